"""RIGHT ANSWERS: the problem of a case, its reference in float64, and how far off a kernel is. Never a user's file."""
