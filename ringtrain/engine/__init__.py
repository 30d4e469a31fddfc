"""Submits operations on arrays to the core and returns their Handles."""
