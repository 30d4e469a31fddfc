"""`horovod.runner.common.util`: hosts, secrets, time limits and the like."""
