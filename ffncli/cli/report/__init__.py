"""`ffn report`."""
