"""The definition of a block: its steps, the recipe that builds them, its activations and costs. Pure Python; no torch,
no numpy, no rich."""
