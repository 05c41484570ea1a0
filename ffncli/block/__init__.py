"""WHAT a block is: steps, the recipe that makes them, activations, costs. Pure Python; no torch, no numpy, no rich."""
