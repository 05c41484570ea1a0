"""A package index on 127.0.0.1 with small wheels, which counts the downloaded bytes."""

import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distribution
from io import BytesIO
from pathlib import Path
from threading import Thread


def write_wheel(
    folder: Path, name: str, version: str, requires: Sequence[str] = (), files: Mapping[str, str | bytes] | None = None
) -> Path:
    """Write a wheel of these files in `folder/NAME/`, as in an index."""
    info = f"{name}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    contents = {
        **(files if files is not None else {f"{name}/__init__.py": ""}),
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    (folder / normalized(name)).mkdir(parents=True, exist_ok=True)
    path = folder / normalized(name) / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in contents.items():
            archive.writestr(file, content)
        archive.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in [*contents, f"{info}/RECORD"]))
    path.with_name(path.name + ".metadata").write_text(str(contents[f"{info}/METADATA"]))
    return path


def write_wheel_of_pip(folder: Path) -> Path:
    """Write the current pip as a wheel, so that an environment can be upgraded to it without a network."""
    pip = distribution("pip")
    files = [file for file in pip.files or () if ".." not in file.parts and file.suffix != ".pyc"]
    contents = {str(file): Path(str(pip.locate_file(file))).read_bytes() for file in files}
    return write_wheel(folder, "pip", pip.version, files={f: c for f, c in contents.items() if ".dist-info/" not in f})


def normalized(name: str) -> str:
    """Return a project's name as written in an index (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


class PackageIndex(ThreadingHTTPServer):
    """Serves `folder` as an index (PEP 503, with PEP 658 metadata). `downloads` maps files, not pages, to bytes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.downloads: dict[str, int] = {}
        super().__init__(("127.0.0.1", 0), lambda *arguments: _Handler(*arguments, directory=str(folder)))

    @property
    def url(self) -> str:
        """The index's address for `pip --index-url`."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(SimpleHTTPRequestHandler):
    server: PackageIndex

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if path.is_file():
            self.server.downloads[path.name] = path.stat().st_size
        super().do_GET()

    def list_directory(self, path: str | os.PathLike[str]) -> BytesIO:
        """Return the page of a project: a link to each wheel, whose metadata can be downloaded separately."""
        names = sorted(file.name for file in Path(path).glob("*.whl"))
        page = "".join(f'<a href="{name}" data-core-metadata="true">{name}</a>\n' for name in names).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        return BytesIO(page)

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def package_index(folder: Path) -> Iterator[PackageIndex]:
    """Serve `folder` and yield the index."""
    with PackageIndex(folder) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
