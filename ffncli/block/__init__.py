"""The definition of a block: steps, the recipe that builds them, activations, costs. Pure Python: no torch, numpy or
rich."""
