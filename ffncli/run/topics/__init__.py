"""The topics of `ffn explain`: a few sentences, a small table of computed numbers, and a command to try next."""
