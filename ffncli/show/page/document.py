"""A whole page in one file: sections, the data that its script reads, style and script; it loads nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any
from xml.etree.ElementTree import Element

from ffncli.show.page.element import Child, element, written

# The page may run its own script and style, and show pictures that it makes; nothing else, from nowhere else.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading; `name` is its anchor."""

    name: str
    title: str
    children: tuple[Child, ...]

    def tree(self) -> Element:
        """The element."""
        head = element("h2", self.title, id=f"{self.name}-title")
        return element("section", head, self.children, id=self.name, aria_labelledby=f"{self.name}-title")


@dataclass(frozen=True)
class PageParts:
    """Sections with the data that the script finds under their names, and the libraries in `vendor` that they need."""

    sections: tuple[Section, ...]
    data: Mapping[str, Any]
    libraries: frozenset[str] = frozenset()


def document(title: str, about: str, parts: Sequence[PageParts]) -> str:
    """The page as text."""
    sections = [section for part in parts for section in part.sections]
    libraries = sorted({name for part in parts for name in part.libraries})
    data = {name: value for part in parts for name, value in part.data.items()}
    style = "\n".join([*(_file(f"vendor/{name}/uPlot.min.css") for name in libraries), _file("page.css")])
    links = [element("li", element("a", section.title, href=f"#{section.name}")) for section in sections]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
    )
    body = element(
        "body",
        element("a", "Skip to the content", href="#main", class_="skip"),
        element("header", element("h1", title), element("p", about)),
        element("nav", element("ul", links), aria_label="Sections"),
        element("main", [section.tree() for section in sections], id="main"),
    )
    text = written(element("html", head, body, lang="en"))
    needed = [name for name, attributes in _SCRIPTS.items() if any(one in text for one in attributes)]
    scripts = [*(_file(f"vendor/{name}/uPlot.iife.min.js") for name in libraries), *map(_file, needed)]
    tail = [f"<style>\n{style}\n</style>", f'<script type="application/json" id="data">{_embedded(data)}</script>']
    tail += [f"<script>\n{script}\n</script>" for script in scripts]
    top, _, rest = text.partition("</head>")
    return (
        f"<!DOCTYPE html>\n{top}{tail[0]}\n</head>{rest.removesuffix('</body></html>')}"
        + "\n".join(tail[1:])
        + ("\n</body></html>\n")
    )


# The page's scripts in order, each with what calls it: an empty text is in every page.
_SCRIPTS = {
    "table.js": ("",),
    "rounds.js": (" data-rounds=",),
    "heat.js": (" data-heat=", " data-tokens="),
    "compute.js": (" data-live=",),
    "live.js": (" data-live=",),
}


def _embedded(data: Any) -> str:
    """JSON that cannot end the script element it is in."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _file(name: str) -> str:
    """A file of this folder."""
    return files("ffncli.show.page").joinpath(name).read_text("utf-8").rstrip("\n")
