"""The version of the package, which imports nothing."""

__version__ = "0.1.0"
