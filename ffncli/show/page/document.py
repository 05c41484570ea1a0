"""A whole page in a single file: sections, style, scripts, and the data that the scripts read; the page loads nothing.

Elements are built as a tree and serialized by the standard library, which escapes every string and attribute.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any
from xml.etree.ElementTree import Element, tostring

from ffncli.errors import clean

# The page may run its own scripts, use its own styles, and show images that it creates; nothing else.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading; `name` is its anchor."""

    name: str
    title: str
    children: "tuple[Child, ...]"

    def tree(self) -> Element:
        """Return the section as an element."""
        head = element("h2", self.title, id=f"{self.name}-title")
        return element("section", head, self.children, id=self.name, aria_labelledby=f"{self.name}-title")


@dataclass(frozen=True)
class PageParts:
    """Sections, the data that their scripts read by name, and the libraries in `vendor` that these scripts need.

    `title` names what they show, if it is more than a file.
    """

    sections: tuple[Section, ...]
    data: Mapping[str, Any]
    libraries: frozenset[str] = frozenset()
    title: str = ""


def document(title: str, about: str, parts: Sequence[PageParts]) -> str:
    """Return the page's HTML."""
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


# The page's scripts in order. A script is included if the page contains any of its strings; every page contains "".
_SCRIPTS = {
    "table.js": ("",),
    "rounds.js": (" data-rounds=",),
    "heat.js": (" data-heat=", " data-tokens="),
    "compute.js": (" data-live=",),
    "exercise.js": (" data-exercise=",),
    "picture.js": (" data-live=",),
    "live.js": (" data-live=",),
}


def _embedded(data: Any) -> str:
    """Return JSON that cannot close the script element that contains it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _file(name: str) -> str:
    """Read a file from this folder."""
    return files("ffncli.show.page").joinpath(name).read_text("utf-8").rstrip("\n")


Child = Element | str | None


def element(tag: str, *children: Child | Iterable[Child], **attributes: object) -> Element:
    """Create an element: `element("a", "text", href="#x")`. Children are elements, strings, None (nothing), or lists of
    these.

    `class_` becomes the attribute class, `data_x` becomes data-x; attributes that are None are omitted. Control
    characters in strings are escaped first.
    """
    names = {name: name.rstrip("_").replace("_", "-") for name in attributes}
    out = Element(tag, {names[name]: clean(str(value)) for name, value in attributes.items() if value is not None})
    for child in children:
        for one in [child] if child is None or isinstance(child, (str, Element)) else child:
            _append(out, one)
    return out


def definitions(pairs: Iterable[tuple[str, str]]) -> Element:
    """Create a definition list from pairs (name, value)."""
    return element("dl", *(element(tag, text) for pair in pairs for tag, text in zip(("dt", "dd"), pair, strict=True)))


def _append(out: Element, child: Child) -> None:
    if isinstance(child, Element):
        out.append(child)
        return
    text = "\n".join(map(clean, (child or "").split("\n"))) if out.tag == "pre" else clean(child or "")
    if len(out):
        out[-1].tail = (out[-1].tail or "") + text
    else:
        out.text = (out.text or "") + text


def written(tree: Element) -> str:
    """Return the element as HTML."""
    return tostring(tree, encoding="unicode", method="html")
