"""What `ffn explain` says: a few sentences, one small table of computed numbers, the next command."""
