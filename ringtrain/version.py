"""The version of ringtrain, for those who may not import the package that stands above them."""

__version__ = "0.1.0"
