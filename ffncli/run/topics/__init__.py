"""The topics of `ffn explain`: a few sentences, a small table of computed values, and a command to try next."""
