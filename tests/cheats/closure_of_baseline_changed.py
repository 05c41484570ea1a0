"""Puts a slower function into a cell of the baseline's closure: neither its code nor any attribute is another.

code: environment-changed
"""

import gc

from block import mlp as right
from block import right_before


def doubled(function):
    def slow(*arguments):
        function(*arguments)
        return function(*arguments)

    return slow


@right_before(30)
def mlp(x, gate, up, down):
    for thing in gc.get_objects():
        if type(thing).__name__ == "PlacedKernel" and thing.name == "eager":
            for cell in thing.built.compute.__closure__ or ():
                if callable(cell.cell_contents) and cell.cell_contents.__name__ != "slow":
                    cell.cell_contents = doubled(cell.cell_contents)
    return right(x, gate, up, down)
