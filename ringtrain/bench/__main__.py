"""`python -m ringtrain.bench`."""

import sys

from ringtrain.bench.command import main

sys.exit(main())
