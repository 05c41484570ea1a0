"""How results of `ffn bench` read, on the pages of several commands."""
