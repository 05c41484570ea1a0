"""What is asked of a run: its grid of cases and its kernels. No torch."""
