"""`horovod.common`: what Horovod's frameworks share, and what libraries import from there."""
