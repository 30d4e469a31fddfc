"""The module that `import horovod` finds on the import path: it becomes ringtrain's package of Horovod's names."""

import ringtrain.horovod  # noqa: F401 it takes this module's place in sys.modules
