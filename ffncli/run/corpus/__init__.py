"""Run a corpus of texts through a model's FFNs and accumulate figures for every unit."""
