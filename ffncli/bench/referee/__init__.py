"""RIGHT ANSWERS: a case's problem, its float64 reference, a kernel's error. User files are never loaded here."""
