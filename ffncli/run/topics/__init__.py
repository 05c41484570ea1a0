"""The topics of `ffn explain`: a few sentences, one small table of computed numbers, the next command."""
