"""What a block is: steps, the recipe that builds them, activations, costs. Pure Python: no torch, numpy or rich."""
