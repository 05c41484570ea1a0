"""The effect of an activation function, in numbers. Computed with Python floats: no torch, no numpy."""
