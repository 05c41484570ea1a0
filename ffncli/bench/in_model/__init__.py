"""Kernels in a user's own program, chosen by speed; and how much faster a whole model becomes with them."""
