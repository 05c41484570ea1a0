"""What `ffn verify` checks: one file per subject; `run/verify/verify.py` has the table of them."""
