"""What becomes of an outcome when its kernel raises."""

import weakref

import torch

from ffncli.bench.records import Outcome
from ffncli.bench.timing.outcomes import BrokenArm, after_breaking, verdict_of
from ffncli.errors import FFNError


def raised_in_a_kernel():
    """(what a guarded call raises, a weak reference to a tensor of the kernel's frame)"""

    def kernel():
        large = torch.zeros(1000)
        held.append(weakref.ref(large))
        raise torch.OutOfMemoryError("CUDA out of memory")

    held = []
    try:
        try:
            try:
                kernel()
            except torch.OutOfMemoryError as error:
                raise FFNError("mine.py, line 3: OutOfMemoryError", "raised when it was called") from error
        except FFNError as error:
            raise BrokenArm("mine") from error
    except BrokenArm as broken:
        return broken, held[0]


def test_what_a_kernel_raised_keeps_none_of_its_tensors():
    """A GPU's memory is given back before the next kernel: frames of the first exception hold tensors as well."""
    broken, tensor = raised_in_a_kernel()
    assert tensor() is not None
    outcome = after_breaking(Outcome("mine"), broken)
    assert tensor() is None
    assert (outcome.status, outcome.note) == ("oom", "mine.py, line 3: OutOfMemoryError")
    assert isinstance(broken.__cause__, FFNError)


def test_a_sentence_of_torchs_and_what_it_was_raised_by_are_one_line():
    error = FFNError("k.py, line 13: IndexError: max(): Expected non-zero size.", "raised when it was called")
    why = "k.py, line 13: IndexError: max(): Expected non-zero size; raised when it was called"
    assert verdict_of(error) == ("failed", why)
