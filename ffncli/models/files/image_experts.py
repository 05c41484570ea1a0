"""Experts of image tokens in a list with the text's, as ERNIE 4.5 VL's files number them: the second half of each list.

A second router, `gate.weight_1`, marks such a layer. transformers has the image tokens' experts in a module of their
own, `vision_moe`; here their names get the same module, which sets them apart from the text's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

ROUTER = "gate.weight_1"  # the text's is `gate.weight`; both are stored [in, out]
_ITS_END = f".{ROUTER}"
MODULE = "vision_moe."
_CORRECTIONS = "moe_statics.e_score_correction_bias"  # one row for text, one for images
_NUMBERED = re.compile(r"(.*?\.)experts\.(\d+)\.", re.DOTALL)


def first_numbers(names: Iterable[str]) -> Mapping[str, int]:
    """Module with two routers → the number of its first expert for images; empty for any other checkpoint."""
    every = [*names]
    experts: dict[str, set[int]] = {n.removesuffix(ROUTER): set() for n in every if n.endswith(_ITS_END)}
    for match in map(_NUMBERED.match, every) if experts else ():
        if match and match[1] in experts:
            experts[match[1]].add(int(match[2]))
    return {module: (len(numbers) + 1) // 2 for module, numbers in experts.items()}


def set_apart(names: Sequence[str], first: Mapping[str, int]) -> Sequence[str]:
    """The names, with `vision_moe` in those of experts for images."""
    return [_renamed(name, first) for name in names] if first else names


def _renamed(name: str, first: Mapping[str, int]) -> str:
    match = _NUMBERED.match(name)
    if match is None or int(match[2]) < first.get(match[1], int(match[2]) + 1):
        return name
    return match[1] + MODULE + name.removeprefix(match[1])


def corrections(name: str, stored: Iterable[str], shape: tuple[int, ...]) -> str:
    """What a tensor with a row for text and one for images is called for images; empty for any other tensor."""
    module = name.removesuffix(_CORRECTIONS)
    both = module != name and module + ROUTER in stored and len(shape) == 2 and shape[0] == 2
    return f"{module}{MODULE}{_CORRECTIONS}" if both else ""
