"""The request for a run: its grid of cases and its kernels. No torch."""
