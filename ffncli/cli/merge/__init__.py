"""`ffn merge`."""
