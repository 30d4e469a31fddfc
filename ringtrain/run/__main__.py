"""`python -m ringtrain.run` is `ringrun`."""

import sys

from ringtrain.run.command import main

sys.exit(main())
