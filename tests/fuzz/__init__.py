"""Input that lies: a valid specimen of every format that ffn reads, and seeded changes of it.

`make fuzz` draws thousands of cases, `make test` some hundred. `python -m tests.fuzz --only journal/17` runs one again.
"families" is no format but what a config says: its cases are held to the tensors of transformers' model (`configs.py`).
"""
