"""RIGHT ANSWERS: a case's problem, its reference in float64, and a kernel's error. A user's file is never loaded
here."""
