"""`horovod.runner.common`: what Horovod's launcher and its integrations share."""
