"""The packages that ffn needs: their minimum versions, the installed versions, the error if a package is missing or
broken, and silence while they run."""

from collections.abc import Iterator
from contextlib import contextmanager

from ffncli.errors import ExitCode, FFNError

# The minimum versions, as in pyproject.toml; not read from the metadata, which a checkout on PYTHONPATH does not have.
REQUIRED = {
    "torch": "2.10", "numpy": "1.26", "typer": "0.26", "rich": "13.8", "pandas": "2.2", "safetensors": "0.5",
    "threadpoolctl": "3.5", "filelock": "3.15",
}  # fmt: skip


def installed(name: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


@contextmanager
def logs_disabled() -> Iterator[None]:
    """Print nothing that other packages log, also while they are imported."""
    import logging

    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def install_command(name: str) -> str:
    """Return the command that installs one of the required packages."""
    return f"pip install '{name}>={REQUIRED[name]}'"


def extra_command(extra: str) -> str:
    """Return the command that installs one of ffn's extras, which are not on any package index."""
    return f"in a clone of ffn: pip install -e '.[{extra}]'"


def reinstall_command(name: str) -> str:
    """Return the command that repairs a package that is installed but does not load."""
    return f"pip install --force-reinstall '{name}>={REQUIRED[name]}'"


def require_installed(*names: str) -> None:
    """Raise FFNError (exit 3) for the first of these required packages that is missing; no package is loaded.

    A command calls this before it starts other processes that need a package.
    """
    from importlib.util import find_spec

    for name in names:
        if find_spec(name) is None:
            raise FFNError(f"{name} is not installed", install_command(name), ExitCode.ENVIRONMENT)


def require_extra(package: str, extra: str) -> None:
    """Raise FFNError (exit 3) if a package of one of ffn's extras is missing; the package is not loaded."""
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise FFNError(f"{package} is not installed", extra_command(extra), ExitCode.ENVIRONMENT)


def package_error(error: BaseException) -> FFNError | None:
    """Return an error for the user (exit 3) if `error` comes from a required package that is missing or fails to load.

    Return None for every other error: once a package is loaded, its errors concern its arguments. While a package
    loads, the bodies of its modules are in the traceback.
    """
    if isinstance(error, ModuleNotFoundError) and error.name in REQUIRED:
        why = f"{error.name} is not installed"
        return FFNError(why, install_command(error.name), ExitCode.ENVIRONMENT)
    loading = [name for name in _packages_loading(error) if name in REQUIRED]
    if isinstance(error, ModuleNotFoundError) and (name := str(error.name).partition(".")[0]) in REQUIRED:
        loading.append(name)  # a module of it is missing: the package is too old, or partly removed
    if not loading or isinstance(error, MemoryError):
        return None
    name = loading[-1]  # the innermost: pandas fails to load if numpy does
    why = f"{name} does not load ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    return FFNError(why, reinstall_command(name), ExitCode.ENVIRONMENT)


@contextmanager
def package_errors() -> Iterator[None]:
    """Turn errors of required packages that are missing or do not load into FFNErrors (exit 3), for library calls."""
    try:
        yield
    except Exception as error:
        if (known := None if isinstance(error, FFNError) else package_error(error)) is not None:
            raise known from error
        raise


def _packages_loading(error: BaseException) -> Iterator[str]:
    """Yield the packages whose module bodies `error` was raised through, the outermost first."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_name == "<module>":
            yield str(frame.f_globals.get("__name__", "")).partition(".")[0]
        trace = trace.tb_next
