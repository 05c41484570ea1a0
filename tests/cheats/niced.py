"""Makes the process yield to all others.

code: environment-changed
"""

import os

from block import mlp as mlp

os.nice(5)
