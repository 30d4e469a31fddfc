"""Which MPI there is, the launcher that belongs to it, and that launcher's words."""
