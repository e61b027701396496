"""Version of the package, without imports."""

__version__ = "0.3.0"
