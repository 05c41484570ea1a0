"""--save of `ffn trace`: every intermediate in one file, for `ffn compare` and for other programs; and its page."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ffncli.cli.common.corpus_options import first_chosen
from ffncli.cli.common.option import OUTPUT, option
from ffncli.dataclass import dataclass
from ffncli.errors import FFNError
from ffncli.run.trace.call import session_for
from ffncli.system.files import check_writable

if TYPE_CHECKING:
    from ffncli.cli.common.options import OutputOptions
    from ffncli.run.trace.question import Question
    from ffncli.show.output import Output

_save = partial(option, OUTPUT)
_OF_A_PAGE = frozenset({"expert", "out", "force", "quiet", "debug", "color", "no_color"})


@dataclass(frozen=True)
class SaveOptions:
    """--save and --save-weights."""

    save: Annotated[
        str | None,
        _save(
            "--save",
            metavar="FILE",
            daily=True,
            help="Save every tensor: .safetensors, .npz, .json; or all values: .csv, .parquet.",
        ),
    ] = None
    save_weights: Annotated[
        bool | None,
        _save("--save-weights/--no-save-weights", help="Save the weights too. [default: if 64 MB or less]"),
    ] = None

    def check(self, show: OutputOptions, *bundles: object) -> None:
        """Raises FFNError if -o names the same file, or a page that cannot follow one of the options of `bundles`: it
        shows the whole block, and as it is.
        """
        path, other = (os.path.realpath(os.path.expanduser(name or "")) for name in (self.save, show.out))
        if None not in (self.save, show.out) and path == other:
            raise FFNError("--save and -o name the same file", "give two names")
        for options in (*bundles, self, show) if is_page(show.out) else ():
            if name := first_chosen(options, _OF_A_PAGE):
                raise FFNError(f"{name} contradicts -o of .html", "the page is of the whole block, as it is")


def is_page(out: str | None) -> bool:
    """Whether -o names a page of HTML."""
    return (out or "").lower().endswith((".html", ".htm"))


def notes_alone(show: OutputOptions) -> OutputOptions:
    """The options of the sink: a page that -o names is written in place of an answer, and only notes are left."""
    return replace(show, out=None) if is_page(show.out) else show


def write_page(question: Question, show: OutputOptions, output: Output) -> None:
    """The page of a small block, all of whose numbers can be changed there.

    Raises FFNError for a block that is too large to compute in a page, or that a page cannot compute.
    """
    page = os.path.expanduser(show.out or "")
    check_writable(page, show.force, "-o")
    with tempfile.TemporaryDirectory() as folder:
        saved = os.path.join(folder, "trace.safetensors")
        session = session_for(replace(question, save=saved, save_weights=True), lambda text: None)
        from ffncli.pages.call import report
        from ffncli.pages.live import live_block
        from ffncli.run.saved.saved import open_saved

        live_block(open_saved(Path(saved)))
        about = (
            "Every number of a feed-forward block, to change and to follow. Made by ffn trace; the page loads nothing."
        )
        written = report(saved, page, title=session.block.name, about=about, force=show.force)
    output.note(f"{written.path}: {written.bytes / 1000:,.0f} kB; change a number there and see what follows")
