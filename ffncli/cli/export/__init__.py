"""`ffn export`: its command and its page."""
