"""Save traces in files, and compare two saved traces."""
