"""Install torch into the environment of the Python that runs this, with CUDA packages only where they are of use.

TORCH_INDEX=URL takes torch from that package index, TORCH_CUDA=1 takes what pip chooses. Without either, pip's dry-run
report decides: a build without CUDA packages is installed by pip. Otherwise uv chooses the build that fits this machine
(its GPU's driver, or the CPU); and where uv cannot, pip installs its own, gigabytes, and the size is said before.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import Request, urlopen

TORCH = ("-c", "constraints.txt", "torch")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
CUDA_PACKAGES = ("nvidia-", "cuda-", "triton")
UV_SECONDS = 60.0  # for uv to say what it would install; UV_SECONDS=N gives it longer
OTHER_INDEX = "make TORCH_INDEX=URL takes torch from another package index"


def main() -> int:
    """Install torch; the exit code of the last installer that ran."""
    index, cuda = os.environ.get("TORCH_INDEX"), os.environ.get("TORCH_CUDA")
    if index:
        say(f"from {index}, as TORCH_INDEX says")
        return pip_install(*TORCH, "--index-url", index)
    if cuda:
        say(f"the build that pip chooses, as TORCH_CUDA says; {OTHER_INDEX}")
        return pip_install(*TORCH)
    packages = pip_report()
    if "torch" not in packages:
        return pip_install(*TORCH)  # it is installed already; so are most of its dependencies
    if any(name.startswith(CUDA_PACKAGES) for name in packages):
        return install_with_uv(packages)
    say(f"{packages['torch']['version']} by pip, without CUDA packages; {OTHER_INDEX}")
    return pip_install(*TORCH)


def install_with_uv(packages: Mapping[str, Any]) -> int:
    """The build that uv chooses for this machine; pip's own, which is `packages`, where uv does not answer."""
    size = size_text(packages)
    chosen, problem = "", "uv could not be installed"
    if pip_install("-qq", "-c", "constraints.txt", "uv") == 0:  # why it could not is in the line below, not in three
        chosen, problem = uv_choice()
    if chosen:
        say(f"{chosen}, which uv chose for this machine; make TORCH_CUDA=1 takes pip's, {size}; {OTHER_INDEX}")
        code, _ = run_uv()
        if code == 0:
            return 0
        problem = f"uv stopped with exit code {code}"
    say(f"{packages['torch']['version']} by pip with CUDA packages, {size} ({problem}); {OTHER_INDEX}")
    return pip_install(*TORCH)


def say(text: str) -> None:
    """One line about what was chosen."""
    print(f"torch: {text}", file=sys.stderr, flush=True)


# --- pip --------------------------------------------------------------------------------------------------------------


def pip_install(*arguments: str) -> int:
    """The exit code of `pip install` with these arguments."""
    return subprocess.run([*PIP, "install", "--quiet", *arguments], check=False).returncode


def pip_report() -> dict[str, Any]:
    """What pip would install for torch here: name → version and URL of the file. Only metadata is downloaded."""
    command = [*PIP, "install", "--quiet", "--dry-run", "--report", "-", *TORCH]
    report = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if report.returncode:
        sys.exit(report.returncode)  # no index was reached, or it has no torch for this Python: pip has said which
    return {
        re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower(): {
            "version": item["metadata"]["version"],
            "url": item["download_info"]["url"],
        }
        for item in json.loads(report.stdout)["install"]
    }


def pip_settings() -> dict[str, str]:
    """pip's configuration: option (`index-url`) → value; as in pip, a variable (PIP_INDEX_URL) overrides the files."""
    listed = subprocess.run([*PIP, "config", "list"], stdout=subprocess.PIPE, text=True, check=False).stdout
    settings: dict[str, str] = {}
    for section in ("global", "install", ":env:"):
        for line in listed.splitlines():
            key, _, value = line.partition("=")
            if key.startswith(f"{section}."):
                settings[key.removeprefix(f"{section}.")] = str(ast.literal_eval(value))
    return settings


def size_text(packages: Mapping[str, Any]) -> str:
    """`26 packages, 2.9 GB to download`, by what the servers say of each file."""
    count = f"{len(packages)} packages"
    try:
        with ThreadPoolExecutor(8) as pool:
            size = sum(pool.map(file_size, (package["url"] for package in packages.values())))
    except (OSError, ValueError, TypeError):  # a server that does not tell, or wants a password
        return f"{count}, several gigabytes to download"
    return f"{count}, {size / 1e9:.1f} GB to download" if size >= 1e8 else f"{count}, {size / 1e6:.1f} MB to download"


def file_size(url: str) -> int:
    """Bytes of the file at that URL."""
    with urlopen(Request(url, method="HEAD"), timeout=10) as answer:
        return int(answer.headers["Content-Length"])


# --- uv ---------------------------------------------------------------------------------------------------------------


def uv_choice() -> tuple[str, str]:
    """The version of torch that uv would install, and nothing; or nothing, and what went wrong."""
    limit = float(os.environ.get("UV_SECONDS") or UV_SECONDS)
    try:
        code, output = run_uv("--dry-run", limit=limit)
    except subprocess.TimeoutExpired:
        return "", f"uv did not answer within {limit:g} s"
    version = re.search(r"\btorch==(\S+)", output)
    if code == 0 and version:
        return version[1], ""
    reasons = re.findall(r"^ *(?:error|cause): *(.*)", output, re.MULTILINE)  # the last is the root cause
    return "", f"uv failed: {reasons[-1] if reasons else f'exit code {code}'}"


def run_uv(*arguments: str, limit: float | None = None) -> tuple[int, str]:
    """Exit code and, of a dry run, output of uv at installing torch for this machine, with the indexes of pip."""
    settings = pip_settings()
    command = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable, "--torch-backend=auto"]
    command += ["--index-strategy=unsafe-best-match", *index_options(settings), *arguments, *TORCH]
    environment = dict(os.environ)
    if "cert" in settings:
        environment.setdefault("SSL_CERT_FILE", settings["cert"])
    if "proxy" in settings:
        environment.setdefault("ALL_PROXY", settings["proxy"])
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if arguments else {}
    done = subprocess.run(command, env=environment, text=True, timeout=limit, check=False, **output)  # type: ignore[call-overload]
    return done.returncode, done.stdout or ""


def index_options(settings: Mapping[str, str]) -> Sequence[str]:
    """uv's options for what pip is configured with: uv reads nothing of pip's."""
    names = {
        "index-url": "--default-index",
        "extra-index-url": "--index",
        "find-links": "--find-links",
        "trusted-host": "--allow-insecure-host",
    }
    options = [
        text for name, option in names.items() for value in settings.get(name, "").split() for text in (option, value)
    ]
    return [*options, "--no-index"] if settings.get("no-index", "").lower() in ("1", "true", "yes", "on") else options


if __name__ == "__main__":
    sys.exit(main())
