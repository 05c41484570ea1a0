"""The request for a run: its grid of cases and its kernels. Needs no torch."""
