"""`ringrun --check`: what the hosts have, and whether they reach each other; and what `--check-build` prints."""
