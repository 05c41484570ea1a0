"""`ffn experts`."""
