"""`ffn explain`: its command and its page."""
