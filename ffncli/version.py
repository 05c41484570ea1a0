"""The version, in a file without imports, so that modules that `ffncli/__init__.py` imports can import it too."""

__version__ = "0.1.0"
