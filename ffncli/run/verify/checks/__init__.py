"""The checks of `ffn verify`, one file per subject; they are listed in a table in `run/verify/verify.py`."""
