"""The FFN parameters of a catalog row as transformers builds the model of its fields, on the meta device.

Nothing is allocated; a model takes 0.1 to 4 s. `python -m tests.oracles.catalog_modules` builds all that `counts.RECENT`
names (`make catalog`) and prints those that differ.
"""

from __future__ import annotations
