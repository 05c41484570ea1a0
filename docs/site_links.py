"""A hook of MkDocs: links to files of the repository that are no pages (`../README.md`) lead to copies in the site."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)")


def on_files(files: Any, config: Any) -> Any:
    """Add every file that a page links to outside of docs/. Raises FileNotFoundError for one that does not exist."""
    from mkdocs.structure.files import File

    pages = [Path(file.abs_src_path).read_text("utf-8") for file in files.documentation_pages()]
    for name in sorted({name for text in pages for name in _OUTSIDE.findall(text)}):
        content = (ROOT / name).read_bytes()
        files.append(File.generated(config, _copied(name), content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point those links to the copies."""
    return _OUTSIDE.sub(lambda match: f"]({_copied(match[1])}", markdown)


def _copied(name: str) -> str:
    """Markdown is served as text: it is written for the repository."""
    return f"files/{name}.txt" if name.endswith(".md") else f"files/{name}"
