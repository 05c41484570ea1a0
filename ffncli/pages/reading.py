"""How to read a page of results, in a few sentences."""

from __future__ import annotations

from ffncli.show.page.element import Child, element

_RATIO = (
    "A ratio is a kernel's time over the baseline's in the same rounds of the same processes: they alternate, so what "
    "slows the machine down slows both. Its interval covers the differences between processes, at 95 %."
)
_VERDICT = (
    "faster and slower: the whole interval lies on that side of 1, outside of the requested precision. same: it lies "
    "within that precision. inconclusive: it is too wide to say; more processes or more time make it narrower."
)
_ROOF = (
    "The roof is the best rate that the same run measured on the same threads: of a large product, or of reading "
    "memory. Above 100 % the machine was faster while the kernel ran than while its roof was measured."
)
_ERROR = (
    "The error is that of the output against float64, ‖a−b‖ / ‖b‖. A kernel that is faster because it computes in "
    "fewer bits shows it there."
)
HOW_TO_READ: tuple[Child, ...] = tuple(element("p", text) for text in (_RATIO, _VERDICT, _ROOF, _ERROR))
