"""`python -m ringtrain.kvstore`."""

import sys

from ringtrain.kvstore.servers.command import main

sys.exit(main())
