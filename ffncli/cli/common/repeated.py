"""Repeated options: lists accumulate, anything else is refused; no value is silently dropped."""

from __future__ import annotations

from collections import Counter
from typing import Any

from typer.core import TyperCommand, TyperOption

from ffncli.errors import FFNError


class OnceCommand(TyperCommand):
    """A command in which only options of type `list[...]`, and flags that cannot contradict themselves, may repeat."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as Typer does. Raises FFNError for two values of an option that takes one."""
        if not ctx.resilient_parsing:  # completion: the line is not finished
            _, _, order = self.make_parser(ctx).parse_args(list(args))
            for option, times in Counter(order).items():
                if times > 1 and isinstance(option, TyperOption) and not _may_repeat(option):
                    names = "/".join([max(option.opts, key=len), *option.secondary_opts])
                    raise FFNError(f"{names} takes one value, got {times}")
        return super().parse_args(ctx, args)


def _may_repeat(option: TyperOption) -> bool:
    """Whether it is a list, or a flag that can only be switched on."""
    return option.multiple or (option.is_flag and not option.secondary_opts)
