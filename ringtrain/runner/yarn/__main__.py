"""Runs a starter, that of roles if it is given a number of servers.

By the path of its folder, not by `-m`: no file of the current folder can then hide a module.
"""

import sys
from pathlib import Path

# ringtrain's own folder comes last, since it may hold other packages
sys.path[:] = [*sys.path[1:], str(Path(__file__).resolve().parents[3])]

if __name__ == "__main__":
    from ringtrain.runner.yarn import role_starter, starter

    is_of_roles = any(word.startswith("--servers=") for word in sys.argv[1:2])
    sys.exit(role_starter.main() if is_of_roles else starter.main())
