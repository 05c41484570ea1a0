"""A corpus of texts through a model's FFNs: figures of every unit, added up while the texts stream by."""
