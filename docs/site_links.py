"""A hook of MkDocs: links to repository files outside docs/ (`../README.md`) point to copies in the site."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)")


def on_files(files: Any, config: Any) -> Any:
    """Add every file outside docs/ that a page links to. Raises FileNotFoundError if a file does not exist."""
    from mkdocs.structure.files import File

    pages = [Path(file.abs_src_path).read_text("utf-8") for file in files.documentation_pages()]
    for name in sorted({name for text in pages for name in _OUTSIDE.findall(text)}):
        content = (ROOT / name).read_bytes()
        files.append(File.generated(config, _copied(name), content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point the links in a page to the copies."""
    return _OUTSIDE.sub(lambda match: f"]({_copied(match[1])}", markdown)


def _copied(name: str) -> str:
    """Return a copy's path in the site. Markdown is served as plain text, because its links fit only the repository."""
    return f"files/{name}.txt" if name.endswith(".md") else f"files/{name}"
