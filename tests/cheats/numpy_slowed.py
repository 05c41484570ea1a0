"""Makes numpy.copyto, which the machine's anchor uses, slow.

code: patched-library
"""

import numpy
from block import mlp as mlp

real = numpy.copyto


def slow(*args, **kwargs):
    real(*args, **kwargs)
    return real(*args, **kwargs)


numpy.copyto = slow
