"""A hook of MkDocs: links to repository files outside docs/ (`../README.md`) point to copies in the site."""

import os.path
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
_UPWARDS = re.compile(r"\]\((\.\./[^)#\s]+)")


def on_files(files: Any, config: Any) -> Any:
    """Add every file outside docs/ that a page links to. Raises FileNotFoundError if a file does not exist."""
    from mkdocs.structure.files import File

    pages = [Path(file.abs_src_path) for file in files.documentation_pages()]
    for name in sorted({name for page in pages for name in _outside(page)}):
        content = (DOCS.parent / name).read_bytes()
        files.append(File.generated(config, _copied(name), content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point the links in a page to the copies."""
    folder = Path(page.file.abs_src_path).parent

    def copied(match: re.Match[str]) -> str:
        name = _name(folder, match[1])
        return f"]({os.path.relpath(DOCS / _copied(name), folder)}" if name else match[0]

    return _UPWARDS.sub(copied, markdown)


def _outside(page: Path) -> Iterator[str]:
    for target in _UPWARDS.findall(page.read_text("utf-8")):
        if name := _name(page.parent, target):
            yield name


def _name(folder: Path, target: str) -> str:
    """Return the path in the repository of a link's target; an empty text if it is a part of the manual."""
    path = Path(os.path.normpath(folder / target))
    return "" if path.is_relative_to(DOCS) else path.relative_to(DOCS.parent).as_posix()


def _copied(name: str) -> str:
    """Return a copy's path in the site. Markdown is served as plain text, because its links fit only the repository."""
    return f"files/{name}.txt" if name.endswith(".md") else f"files/{name}"
