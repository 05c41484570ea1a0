"""Binds the process to another core, the last one.

code: environment-changed
"""

import os

from block import mlp as mlp

os.sched_setaffinity(0, {os.cpu_count() - 1})
