"""What an activation function does, in numbers, on Python floats: no torch, no numpy."""
