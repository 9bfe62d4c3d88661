"""The version of the package, which a module below `infinity` itself may import."""

__version__ = "0.1.0"
