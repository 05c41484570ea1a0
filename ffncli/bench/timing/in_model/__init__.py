"""`ffn bench --in-model`: a whole model in the place of a block."""
