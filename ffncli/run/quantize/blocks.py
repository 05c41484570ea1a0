"""A tensor as a grid of blocks of values that share a scale."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Blocks:
    """Blocks of `block` values along each axis of a tensor of `shape`; the last block of an axis may be smaller."""

    shape: tuple[int, ...]
    block: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of blocks along each axis."""
        return tuple(-(-size // each) for size, each in zip(self.shape, self.block, strict=True))

    @property
    def _whole(self) -> tuple[int, ...]:
        """The shape, rounded up to whole blocks."""
        return tuple(count * each for count, each in zip(self.counts, self.block, strict=True))

    def split(self, x: Tensor) -> Tensor:
        """Return the values of each block, [*counts, values of a block], filled up with zeros."""
        axes = len(self.shape)
        if self._whole != self.shape:
            missing = [after - size for size, after in zip(self.shape, self._whole, strict=True)]
            x = functional.pad(x, [n for size in reversed(missing) for n in (0, size)])
        pairs = [n for pair in zip(self.counts, self.block, strict=True) for n in pair]
        return x.reshape(pairs).permute(*range(0, 2 * axes, 2), *range(1, 2 * axes, 2)).flatten(axes)

    def join(self, blocks: Tensor) -> Tensor:
        """Return the tensor of `shape` whose blocks these are, [*counts, values of a block]; undoes `split`."""
        axes = len(self.shape)
        apart = blocks.reshape(*self.counts, *self.block)
        whole = apart.permute([axis for at in range(axes) for axis in (at, axes + at)]).reshape(self._whole)
        return whole[tuple(slice(size) for size in self.shape)].contiguous()

    def at(self, index: tuple[int, ...]) -> tuple[int, ...]:
        """Return the position in the grid of the block of the value at `index`."""
        return tuple(n // each for n, each in zip(index, self.block, strict=True))
