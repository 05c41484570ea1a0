"""HOW it is shown. Knows tables, excerpts of tensors and text; knows nothing of FFNs."""
