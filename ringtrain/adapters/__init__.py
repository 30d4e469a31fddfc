"""One module for each array library; see `ringtrain.arrays.Adapter` for what is in it."""
