"""The version of ringtrain, in a module that every floor may import."""

__version__ = "0.1.0"
