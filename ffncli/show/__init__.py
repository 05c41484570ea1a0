"""HOW answers are shown. Knows tables, excerpts of tensors and text; knows nothing about FFNs."""
