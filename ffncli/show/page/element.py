"""Elements of a page, built as a tree and written by the standard library, which escapes every text and attribute; a
record as a notebook shows it, a small table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.etree.ElementTree import Element, tostring

from ffncli.errors import clean

Child = Element | str | None


def element(tag: str, *children: Child | Iterable[Child], **attributes: object) -> Element:
    """`element("a", "text", href="#x")`: children are elements, texts, None (nothing), or lists of these.

    `class_` is the attribute class, `data_x` is data-x; attributes that are None are left out. Texts are made safe to
    print first: no control characters.
    """
    names = {name: name.rstrip("_").replace("_", "-") for name in attributes}
    out = Element(tag, {names[name]: clean(str(value)) for name, value in attributes.items() if value is not None})
    for child in children:
        for one in [child] if child is None or isinstance(child, (str, Element)) else child:
            _append(out, one)
    return out


def definitions(pairs: Iterable[tuple[str, str]]) -> Element:
    """A list of (name, its value)."""
    return element("dl", *(element(tag, text) for pair in pairs for tag, text in zip(("dt", "dd"), pair, strict=True)))


def _append(out: Element, child: Child) -> None:
    if isinstance(child, Element):
        out.append(child)
    elif child is not None and len(out):
        out[-1].tail = (out[-1].tail or "") + clean(child)
    elif child is not None:
        out.text = (out.text or "") + clean(child)


def written(tree: Element) -> str:
    """The element as HTML."""
    return tostring(tree, encoding="unicode", method="html")


_MOST_ROWS = 100


def record_table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The rows under a caption; floats with four digits, None empty, and how many of many rows are left out."""
    every = [*rows]
    head = element("tr", [element("th", name) for name in columns])
    body = [element("tr", [element("td", _cell(cell)) for cell in row]) for row in every[:_MOST_ROWS]]
    if len(every) > _MOST_ROWS:
        body.append(element("tr", element("td", f"… {len(every) - _MOST_ROWS:,} more", colspan=len(columns))))
    return written(element("table", element("caption", caption), head, body))


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
