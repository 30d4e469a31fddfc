"""What `python -m ringtrain.bench mxnet` measures."""
