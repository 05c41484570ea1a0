"""The checks of `ffn verify`: one file per subject; `run/verify/verify.py` has the table of them."""
