"""The place of one value, as typed: `up[0,3]`. Does not import torch."""

import re

from ffncli.errors import FFNError, option, shown

StepIndex = tuple[str, tuple[int, ...]]


def place_of(text: str) -> StepIndex:
    """Parse `up[0,3]`, `up[0, -1]`, `up:0,3` or `experts[2].up[0,3]` into (name, index)."""
    plain = re.sub(r"\[([0-9]{1,9})\]\.", r".\1.", text.strip())
    match = re.fullmatch(r"([^\[\]:]+)(?:\[([^\[\]]*)\]|:(.*))", plain, re.DOTALL)
    words = (match[2] if match[2] is not None else match[3]).split(",") if match else []
    if not match or not all(re.fullmatch(r"\s*-?[0-9]{1,18}\s*", word, re.ASCII) for word in words):
        raise FFNError(
            f"{option('explain')} {shown(text)} is not an element of a tensor", "give NAME[i,j], such as up[0,3]"
        )
    return match[1].strip(), tuple(int(word) for word in words)
