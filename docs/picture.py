"""The pictures of `ffn trace`: in the README an SVG of what a terminal with 100 columns shows, on the manual's first
page the drawing of a small block.

    python -m docs.picture [FILE]

Both contain text, so that it can be searched and copied, and they load no font.
"""

import io
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI

import ffncli
from ffncli.cli.trace.page import trace_answer
from ffncli.pages.drawing import block_drawing
from ffncli.run.saved.saved import open_saved
from ffncli.show.terminal import Terminal

COLUMNS = 100
FILE = Path(__file__).parent / "trace.svg"
BLOCK = Path(__file__).parent / "block.svg"
_SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
  <style>
  .{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
    font-size: {char_height}px; line-height: {line_height}px; white-space: pre; }}
  .{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
  {styles}
  </style>
  <defs>
  <clipPath id="{unique_id}-clip-terminal">
    <rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
  </clipPath>
  {lines}
  </defs>
  {chrome}
  <g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
  {backgrounds}
  <g class="{unique_id}-matrix">
  {matrix}
  </g>
  </g>
</svg>
"""


def picture() -> str:
    """Return the SVG of the default trace."""
    return _console().export_svg(
        title="ffn trace", theme=DIMMED_MONOKAI, code_format=_SVG, unique_id="ffn", font_aspect_ratio=0.6
    )


def block() -> bytes:
    """Return the drawing of a small gated block, as `ffn trace 3x4:swiglu --tokens 2 -o block.svg` writes it."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "t.npz"
        ffncli.trace("3x4:swiglu", tokens=2, save=path, save_weights=True)
        return block_drawing(open_saved(path)).svg()


def _console() -> Console:
    """Return a recording console on which the default trace was printed."""
    page = trace_answer(ffncli.trace(), digits=4)
    terminal = Terminal(io.StringIO(), color=True)
    terminal.console = Console(
        file=io.StringIO(), record=True, width=COLUMNS, force_terminal=True, color_system="truecolor",
        markup=False, highlight=False, emoji=False,
    )  # fmt: skip
    terminal.encoding = "utf-8"
    terminal.show(page.parts)
    return terminal.console


if __name__ == "__main__":
    (Path(sys.argv[1]) if len(sys.argv) > 1 else FILE).write_text(picture(), encoding="utf-8")
    BLOCK.write_bytes(block())
