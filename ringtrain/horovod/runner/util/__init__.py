"""`horovod.runner.util`: threads and addresses of hosts."""
