"""The only sink for answers: an Answer becomes a table, JSON, CSV, Markdown or HTML. Data go to stdout, notes to
stderr.

A terminal gets output through rich; a pipe or a file gets the same content as plain aligned text at its natural width,
without escape codes.
"""

import io
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ffncli.errors import FFNError, clean, shown, spelled
from ffncli.options.opt import as_typed
from ffncli.show.color import ColorChoice, Paint, curve_style, is_colored, painted, sign_style, unpainted
from ffncli.show.parts import Answer, Fold, Heading, Line, Part, Table, csv_text
from ffncli.show.plots.plot import Plot
from ffncli.show.tensors import Excerpt, HeatMap
from ffncli.show.text import aligned, encodable, folded, json_safe, width
from ffncli.system.files import check_writable, written_whole

Format = Literal["table", "json", "csv", "md", "html"]
SCHEMA_VERSION = 1
_NUMBERS = re.compile(r"\[\n\s*((?:[-+\d.eE]+|null)(?:,\s*(?:[-+\d.eE]+|null))*)\n\s*\]")


@dataclass(frozen=True)
class Output:
    """Where and how answers appear. Creating it raises FFNError if the file may not be written."""

    format: Format = "table"
    path: str | None = None
    force: bool = False
    color: ColorChoice = "auto"
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.format not in get_args(Format):
            raise FFNError(f"--format: unknown format {shown(self.format)}", "use table, json, csv, md or html")
        if self.path is not None:
            check_writable(self.path, self.force, "-o")

    def note(self, text: str) -> None:
        """Print a note on stderr, unless quiet."""
        if not self.quiet:
            print_error(f"note: {spelled(text, as_typed)}")

    def notes(self, *texts: str) -> None:
        """Print several notes."""
        for text in texts:
            self.note(text)

    def wrote(self, path: str, what: str = "") -> None:
        """Print the note that every command prints once it has written a file that the user named; `what` is a verdict
        in the file, or its size."""
        self.note(f"wrote {path}: {what}" if what else f"wrote {path}")

    def show(self, answer: Answer, verdict: str = "") -> None:
        """Render and write the answer; a file is written completely or not at all. `verdict` is what the answer says in
        short."""
        if self.path not in (None, "-"):
            text = self._render(answer, "utf-8")
            with written_whole(Path(str(self.path))) as file:
                file.write(text.encode())
            self.wrote(str(self.path), verdict)
        elif self.format == "table" and sys.stdout.isatty():
            from ffncli.show.terminal import Terminal  # rich is imported only for a terminal

            Terminal(sys.stdout, is_colored(sys.stdout, self.color)).show(answer.parts)
        else:
            if self.format in ("json", "csv", "html") and isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(encoding="utf-8")  # the encoding of data does not depend on the locale
            encoding = sys.stdout.encoding or "utf-8"
            color = is_colored(sys.stdout, self.color)
            sys.stdout.write(encodable(self._render(answer, encoding, color), encoding))
            sys.stdout.flush()

    def write(self, text: str) -> None:
        """Write a string that is itself the answer, unchanged, in UTF-8."""
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")
        sys.stdout.write(text)
        sys.stdout.flush()

    def _render(self, answer: Answer, encoding: str, color: bool = False) -> str:
        if self.format == "json":
            return _json(answer)
        if self.format == "csv":
            return _csv(answer.rows)
        if self.format == "md":
            return markdown(answer.parts, encoding)
        if self.format == "html":
            return _html(answer)
        return plain(answer.parts, encoding, painted if color else unpainted)


_LONGEST_LINE = 2000  # strings from files and arguments can have any length


def print_error(text: str) -> None:
    """Print one line on stderr, safe for any terminal, truncated if it is very long; does nothing if stderr is closed.

    On a terminal the line is wrapped between words.
    """
    if len(text) > _LONGEST_LINE:
        text = text[: _LONGEST_LINE - 1] + "…"
    text = clean(text)
    try:
        if sys.stderr.isatty() and (columns := _columns()):
            text = folded(text, columns)
        sys.stderr.write(encodable(text, getattr(sys.stderr, "encoding", None) or "utf-8") + "\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass


def _columns() -> int:
    """Return the width of the terminal behind stderr; 0 if it is unknown."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except OSError:
        return 0


# --- for machines -----------------------------------------------------------------------------------------------------


def _json(answer: Answer) -> str:
    whole = {
        "schema_version": SCHEMA_VERSION,
        "command": answer.command,
        "conventions": dict(answer.conventions),
        **answer.body,
    }
    text = json.dumps(_finite(whole), indent=2, allow_nan=False, ensure_ascii=False)
    # Put lists of numbers on one line: a shape or a row of values is easier to read that way.
    return json_safe(_NUMBERS.sub(lambda m: "[" + re.sub(r"\s+", " ", m[1]) + "]", text)) + "\n"


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


def _csv(table: Table) -> str:
    import csv

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows([csv_text(cell) for cell in row] for row in table.rows)
    return out.getvalue()


# --- for people -------------------------------------------------------------------------------------------------------


def plain(parts: Sequence[Part], encoding: str, paint: Paint = unpainted) -> str:
    """Return the parts of an answer as lines of natural width; colours only add escape codes to the same lines."""
    lines: list[str] = []
    for part in parts:
        match part:
            case Heading():
                remark = paint(clean(part.remark), "dim")
                lines += ([""] if lines else []) + [f"{paint(clean(part.text), 'bold')}  {remark}".rstrip()]
            case Line():
                lines.append("  " + paint(clean(part.text), "dim" if part.quiet else ""))
            case Excerpt():
                lines += ["  " + "  ".join(paint(text, sign_style(v)) for text, v in line) for line in part.lines()]
            case HeatMap():
                lines += [f"  {text}" for text in part.characters()] + ["  " + paint(part.scale(False), "dim")]
            case Table():
                lines += ([""] if lines else []) + _plain_table(part, paint)
            case Plot():
                lines += ([""] if lines else []) + _plain_plot(part, encoding, paint)
            case Fold():
                lines += ([""] if lines else []) + plain(part.parts, encoding, paint).splitlines()
    return "".join(line.rstrip() + "\n" for line in lines)


def _html(answer: Answer) -> str:
    from ffncli.show.page.answer import answer_parts
    from ffncli.show.page.document import document

    parts = [*answer.pages(), answer_parts(answer)]
    title = next((part.title for part in parts if part.title), "") or parts[0].sections[0].title
    return document(title, f"Made by ffn {answer.command}; the page loads nothing.", parts)


def _plain_plot(plot: Plot, encoding: str, paint: Paint = unpainted) -> list[str]:
    from ffncli.show.plots.braille import drawn  # imported here: most pages have no plot, and the import takes 2 ms

    lines = drawn(plot, encoding=encoding)
    return ["".join(paint(text, curve_style(style)) for text, style in line).rstrip() for line in lines]


def _plain_table(table: Table, paint: Paint) -> list[str]:
    texts, right = table.texts(), table.right_aligned()
    names = [clean(name) for name in table.columns]
    widths = [max([width(c), *(width(row[i]) for row in texts)]) for i, c in enumerate(names)]
    head = [names] if any(names) else []
    bold = {-1, *table.emphasis}  # -1 stands for the column names
    lines = enumerate(aligned([*head, *texts], widths, right), -len(head))
    title = [paint(clean(table.title), "bold")] if table.title else []
    return title + [paint(line, "bold" if at in bold else "") for at, line in lines]


def markdown(parts: Sequence[Part], encoding: str = "utf-8") -> str:
    """Return the parts of an answer as Markdown."""
    from html import escape

    out: list[str] = []
    for part in parts:
        match part:
            case Heading():
                out += ["", f"### {_md(part.text)}", "", *([_md(part.remark), ""] if part.remark else [])]
            case Line():
                out += [_md(part.text), ""]
            case Excerpt():
                out += ["```text", *("  ".join(text for text, _ in line).rstrip() for line in part.lines()), "```", ""]
            case HeatMap():
                out += ["```text", *part.characters(), part.scale(False), "```", ""]
            case Table():
                out += ["", *([f"**{_md(part.title)}**", ""] if part.title else []), *_markdown_table(part), ""]
            case Plot():
                out += ["", "```text", *_plain_plot(part, encoding), "```", ""]
            case Fold():
                summary = escape(clean(part.summary), quote=False)  # in a tag, Markdown's escapes do not work
                out += ["", "<details>", f"<summary>{summary}</summary>", ""]
                out += [markdown(part.parts, encoding), "</details>", ""]
    text = "\n".join(out).strip("\n") + "\n"
    return re.sub(r"\n{3,}", "\n\n", text)


def _markdown_table(table: Table) -> list[str]:
    rule = ["---:" if r else "---" for r in table.right_aligned()]
    rows = [[_md(c) for c in table.columns], rule, *([_md(c) for c in row] for row in table.texts())]
    return ["| " + " | ".join(row) + " |" for row in rows]


def _md(text: str) -> str:
    """Escape an untrusted string for Markdown; an `@name` in it notifies nobody."""
    escaped = re.sub(r"([\\|*_`~<>\[\]#])", r"\\\1", clean(text))
    return re.sub(r"(?<!\w)@(?=\w)", "@<!-- -->", escaped)
