"""`--kernel`: a text is parsed into a KernelChoice once, by a single grammar; all later processes use the KernelChoice.

    NAME                           a kernel of the package: eager, packed, ...; `all`: all of them; `auto`: the
                                   fastest of them for the case on this machine
    [LABEL=]FILE.py[:NAME]         a function, an nn.Module or a Kernel in a user's file
    [LABEL=]REF:FILE.py[:NAME]     the same, from the file as it is in a git commit: REF is a hash, a branch, a tag or
                                   `HEAD~1`
    [LABEL=]slowed:FACTOR:KERNEL   a kernel as above, slowed by a known factor, which a self-test must detect

Parsing reads no files and does not need torch.

A user's function receives a block's weights through arguments named after them.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ffncli.block.steps import Step, parameters
from ffncli.errors import FFNError, shown
from ffncli.kernels import AUTO, BUILT_IN, OVER_RANKS, full_name, unknown_kernel

_FORM = re.compile(r"(?:(?P<label>[^=:/]+)=)?(?:slowed:(?P<factor>[^:]*):)?(?P<kernel>.*)", re.DOTALL)
_FILE = re.compile(r"(?:(?P<ref>[^:\n-][^:\n]*):)?(?P<path>[^:\n]+\.py)(?::(?P<attribute>\w+))?")
_LABEL = re.compile(r"[^=:/]+")
_FACTOR = re.compile(r"[1-9][0-9]{0,2}(?:\.[0-9]{1,9})?")


@dataclass(frozen=True)
class KernelChoice:
    """One kernel chosen by `--kernel`; `label` is its name in results.

    `kernel` is the name of a kernel of the package, or the path of a user's file as typed. `attribute` names the kernel
    in that file; None stands for the only kernel in it, and then `label` may be empty until its name is known. `factor`
    is the factor by which the kernel is slowed down, kept as typed because results are looked up by label. `ref` is the
    git commit from which the file is taken, as typed or, after it was resolved, as its full hash; None for the file in
    the working tree.
    """

    label: str
    kernel: str
    attribute: str | None = None
    factor: str | None = None
    ref: str | None = None

    @property
    def file(self) -> Path | None:
        """The absolute path of the user's file, which need not exist with a `ref`; None for a kernel of the package."""
        return Path(os.path.abspath(os.path.expanduser(self.kernel))) if self.kernel.endswith(".py") else None

    @property
    def text(self) -> str:
        """The text that `parse` turns into this choice; a label that cannot be written in such a text is omitted."""
        plain = self._plain
        if self.label in ("", self._default_label) or not _LABEL.fullmatch(self.label):
            return plain
        return f"{self.label}={plain}"

    def with_attribute(self, attribute: str) -> "KernelChoice":
        """Return this choice with that kernel of the file; a missing label is built from the kernel's name."""
        choice = replace(self, attribute=attribute)
        return replace(choice, label=self.label or choice._default_label)

    @property
    def _plain(self) -> str:
        return self._front + (f"{self.kernel}:{self.attribute}" if self.attribute else self.kernel)

    @property
    def _front(self) -> str:
        """The prefix of the kernel's name: its slow-down factor and its commit."""
        slowed = "" if self.factor is None else f"slowed:{self.factor}:"
        return slowed if self.ref is None else f"{slowed}{self.ref}:"

    @property
    def _default_label(self) -> str:
        if self.file is None:
            return self._plain
        return f"{self._front}{self.file.name}:{self.attribute}" if self.attribute else ""


def parse(text: str) -> KernelChoice:
    """Parse one word of `--kernel`. Raises FFNError for a word that is not a kernel."""
    match = _FORM.fullmatch(text)
    assert match is not None  # always true: the pattern matches any text
    label, factor, kernel = match.group("label", "factor", "kernel")
    if factor is not None and not _FACTOR.fullmatch(factor):
        hint = "write it as slowed:FACTOR:KERNEL, such as slowed:1.05:eager, FACTOR from 1 to 999"
        raise FFNError(f"--kernel: {shown(factor)} is not a factor, in {shown(text)}", hint)
    if factor is not None and kernel == AUTO:
        raise FFNError(f"--kernel: {shown(text)} is not a kernel", "auto cannot be slowed: name a kernel")
    attribute = ref = None
    if ".py" in kernel:  # no kernel of the package has this in its name, so it is a file
        file = _FILE.fullmatch(kernel)
        if not file:
            raise FFNError(f"--kernel: {shown(text)} is not a kernel", "write it as file.py:name or label=file.py:name")
        kernel, attribute, ref = file.group("path", "attribute", "ref")
    elif full_name(kernel) not in (*BUILT_IN, *OVER_RANKS, AUTO) or (label and factor is None):
        raise unknown_kernel(text if factor is None else kernel)
    else:
        kernel = full_name(kernel)
    if label in (*BUILT_IN, AUTO):
        raise FFNError(f"--kernel: {shown(label)} is one of ffn's own kernels", "give another label")
    choice = KernelChoice("", kernel, attribute, factor, ref)
    return replace(choice, label=label or choice._default_label)


def choices(texts: Iterable[str]) -> tuple[KernelChoice, ...]:
    """Parse the values of `--kernel`, each a comma-separated list; return the choices in order, without duplicates.

    Raises FFNError for a word that is not a kernel, and for two choices with the same label.
    """
    words = (word.strip() for text in texts for word in text.split(","))
    parsed = tuple(dict.fromkeys(parse(name) for word in words for name in (BUILT_IN if word == "all" else (word,))))
    require_unlike([choice.label for choice in parsed if choice.label])
    return parsed


def require_unlike(labels: Sequence[str]) -> None:
    """Raise FFNError if two kernels have the same label."""
    twice = next((label for n, label in enumerate(labels) if label in labels[:n]), None)
    if twice is not None:
        raise FFNError(f"--kernel: two kernels are called {shown(twice)}", "give labels: --kernel a=file.py:name")


def argument(parameter: str) -> str:
    """Return a weight's argument name: `up.weight` is up, `up.bias` up_bias, `shared.up.weight` shared__up."""
    step, _, kind = parameter.rpartition(".")
    return step.replace(".", "__") + ("" if kind == "weight" and step != "act" else f"_{kind}")


def by_argument(steps: Sequence[Step]) -> dict[str, str]:
    """Return argument → the block's parameter that it receives."""
    return {argument(name): name for name in parameters(steps)}


def missing_weight(required: Iterable[str], steps: Sequence[Step]) -> tuple[str, str] | None:
    """Find the function's first required argument that no weight fills. Return a message about that argument, and a
    hint that lists the block's weights; return None if weights fill all required arguments."""
    weights = by_argument(steps)
    name = next((name for name in required if name not in weights), None)
    if name is None:
        return None
    return f"needs {name}, which this block does not have", f"this block has {', '.join(weights)}"
