"""A parameter server beside the allreduce: one array for each key, pushed to and pulled from."""
