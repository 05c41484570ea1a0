"""The version, alone: the package names what lies above its floors, so none of them imports the package for it."""

__version__ = "0.1.0"
