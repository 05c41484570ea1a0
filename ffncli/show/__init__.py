"""HOW answers are shown. Knows tables, text and excerpts of tensors; knows nothing about FFNs."""
