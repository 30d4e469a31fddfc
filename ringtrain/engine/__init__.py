"""The road into the core: from an operation on arrays to a Handle."""
