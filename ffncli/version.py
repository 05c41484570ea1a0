"""The version, in a file of its own: `ffncli/__init__.py` imports from the floors, so no floor may import it."""

__version__ = "0.1.0"
