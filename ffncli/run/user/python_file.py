"""Executing a user's Python file, and finding the arguments for its class among the dimension options."""

import ctypes
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field, fields
from importlib.util import module_from_spec, spec_from_file_location
from inspect import Parameter
from pathlib import Path
from traceback import extract_tb
from types import ModuleType, SimpleNamespace
from typing import Any, is_typeddict

from torch import nn

from ffncli.block import activations
from ffncli.errors import FFNError, Terminated, did_you_mean, shown, shown_path
from ffncli.models.dimensions import Dimensions, whole, width
from ffncli.run.engine.execute import function
from ffncli.run.user.plain_object import is_class, is_instance
from ffncli.run.user.surroundings import FromSource
from ffncli.run.user.time_limit import OutOfTime

Form = Callable[[str], Any]  # converts an activation's name to the constructor's value


@dataclass(frozen=True)
class Role:
    """The role of an argument: the option that fills it, its usual names, and its value if the option is not set."""

    option: str
    names: tuple[str, ...]
    otherwise: Any = None


# Names are compared ignoring case and underscores. The first row that lists a name decides, except for the names in
# `_EITHER`.
ROLES = (
    Role("d_model", (
        "d_model", "hidden_size", "dim", "n_embd", "embed_dim", "emb_dim", "embedding_dim", "d", "in_features",
        "input_dim", "input_size", "model_dim", "d_in", "in_dim", "size", "width", "channels", "emb_size", "embed_size",
        "out_features", "output_dim", "output_size", "d_out", "out_dim",
    )),
    Role("d_ff", (
        "d_ff", "intermediate_size", "hidden_dim", "ffn_dim", "dim_ff", "ff_dim", "n_inner", "inner_dim", "d_hidden",
        "mlp_dim", "ffn_hidden_size", "dim_feedforward", "feedforward_dim", "d_inner", "hidden_features", "hidden",
        "feedforward_size", "ff_size", "ffn_size", "mlp_size", "d_mlp", "ffn_embed_dim", "ff_hidden_size", "h",
    )),
    Role("ratio", (
        "mult", "ff_mult", "mlp_ratio", "expansion", "expansion_factor", "expansion_ratio", "widening_factor", "ratio",
        "multiplier", "hidden_mult", "factor",
    )),
    Role("dropout", (
        "dropout", "p", "dropout_rate", "drop", "dropout_prob", "dropout_p", "p_dropout", "drop_rate", "resid_pdrop",
        "hidden_dropout_prob", "hidden_dropout", "ffn_dropout", "activation_dropout", "ff_dropout",
    ), 0.0),
    Role("bias", ("bias", "use_bias", "add_bias", "mlp_bias"), True),
    Role("gated", ("gated", "use_gate", "is_gated", "glu", "use_glu")),
    Role("activation", (
        "activation", "act", "act_fn", "hidden_act", "activation_function", "nonlinearity", "act_layer",
        "activation_fn", "hidden_activation", "non_linearity",
    ), "relu"),
    Role("experts", (
        "experts", "num_experts", "n_experts", "num_local_experts", "n_routed_experts", "n_expert", "moe_num_experts",
    )),
    Role("top_k", (
        "top_k", "k", "topk", "num_experts_per_tok", "experts_per_token", "n_activated_experts", "num_selected_experts",
        "moe_top_k",
    )),
    Role("shared_experts", ("shared_experts", "n_shared_experts", "num_shared_experts")),
)  # fmt: skip
_CONFIG = ("config", "cfg", "args", "params", "hparams", "conf", "options", "model_args", "configuration")
# The meaning of these names depends on the other arguments: MLP(input_size, hidden_size), FFN(hidden_dim, ffn_dim).
_EITHER = ("hidden_size", "hidden_dim", "hidden", "d_hidden")


@dataclass
class Filled:
    """The arguments for one call, the options that were used (`used`), and the defaults that had to be assumed
    (`taken`).

    `formed` is True if an activation is among the arguments.
    """

    positional: list[Any] = field(default_factory=list)
    named: dict[str, Any] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    taken: list[str] = field(default_factory=list)
    formed: bool = False


class NotTaken(FFNError):
    """Raised for dimension options that no argument of a user's module accepts; `unused` are their fields."""

    def __init__(self, message: str, hint: str, unused: tuple[str, ...]) -> None:
        super().__init__(message, hint)
        self.unused = unused


def calls(cls: type[Any], dimensions: Dimensions) -> list[Filled]:
    """Return the candidate arguments for building `cls`; there are several if it has an activation, which can be a
    name, a function or a class.

    The caller uses the first candidate that works, since only building or running shows which form a class expects.
    Raises NotTaken for an option that corresponds to no argument.
    """
    values = _values(dimensions)
    forms: tuple[Form, ...] = (str, _function, lambda name: lambda *_, **__: _function(name))
    first = _fill(cls, values, forms[0])
    set_options = [f.name for f in fields(dimensions) if getattr(dimensions, f.name) is not None]
    if unused := tuple(name for name in set_options if name not in first.used and name != "d_model"):
        names = " and ".join(map(option, unused))
        raise NotTaken(f"{names}: no argument of {signature_text(cls)} accepts it", "leave it out", unused)
    return [first, *(_fill(cls, values, form) for form in forms[1:])] if first.formed else [first]


def option(name: str) -> str:
    """Return the option of a field, such as `--d-model`; for a switch, the option that turns it on."""
    return "--" + name.replace("_", "-")


def signature_text(cls: type[Any]) -> str:
    """Return the signature, such as `FeedForward(d_model, d_ff, dropout=0.1)`, without annotations."""
    plain = [p.replace(annotation=Parameter.empty) for p in _signature(cls).parameters.values()]
    text = f"{cls.__name__}{inspect.Signature(plain)}"
    return text if len(text) <= 160 else text[:159] + "…"


def _values(dimensions: Dimensions) -> dict[str, Any]:
    """Return the values of the options by role; d_ff stays a string until d_model is known."""
    out = {f.name: getattr(dimensions, f.name) for f in fields(dimensions) if getattr(dimensions, f.name) is not None}
    if dimensions.d_model is not None:
        out["d_model"] = whole("--d-model", dimensions.d_model)
    if dimensions.activation is not None:
        activations.resolve(dimensions.activation)  # raises for an unknown name before the user's code runs
    return out


def _fill(cls: type[Any], values: Mapping[str, Any], form: Form) -> Filled:
    """Fill the arguments of `cls` from the options, else from its own defaults, else with ffncli's defaults."""
    parameters = [p for p in _signature(cls).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    roles = _roles([p.name for p in parameters])
    by_role = _with_widths(values, {role: p.default for p in parameters if (role := roles[p.name])})
    out = Filled()
    for p in parameters:
        role = roles[p.name]
        if role is not None and role in by_role:
            value = by_role[role]
            out.used.add("d_ff" if role == "ratio" else role)
        elif p.default is not p.empty:
            continue
        elif role is None and _plain(p.name) in map(_plain, _CONFIG):
            value = _config(p, values, form, out)
        else:
            value = _otherwise(cls, p.name, role, by_role, out)
        if role == "activation":
            value, out.formed = form(value), True
        if p.kind is p.POSITIONAL_ONLY:
            out.positional.append(value)
        else:
            out.named[p.name] = value
    return out


def _with_widths(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with d_ff as a number and `ratio` as d_ff / d_model. d_model may be the class's own default."""
    out: dict[str, Any] = dict(values)
    default = defaults.get("d_model")
    d_model = out.get("d_model", default if type(default) is int else None)
    if "d_ff" in out:
        if d_model is None and out["d_ff"].endswith("x"):
            raise FFNError(f"--d-ff {out['d_ff']} is a multiple of --d-model", "give --d-model N too")
        out["d_ff"] = width("--d-ff", out["d_ff"], d_model or 0)
        if d_model:
            out["ratio"] = out["d_ff"] // d_model if out["d_ff"] % d_model == 0 else out["d_ff"] / d_model
    return out


def _otherwise(cls: type[Any], name: str, role: str | None, by_role: Mapping[str, Any], out: Filled) -> Any:
    """Return ffncli's default for a required argument that no option filled, and note it in `out.taken`."""
    if role in ("d_ff", "ratio") and "d_model" in by_role:
        out.taken.append("d_ff = 4x")
        return 4 * by_role["d_model"] if role == "d_ff" else 4
    row = next((row for row in ROLES if row.option == role), None)
    if row is None:
        raise FFNError(
            f"{signature_text(cls)} needs {name}, which no option sets", f"give it a default, or {_INSTANCE}"
        )
    if row.otherwise is None:
        needed = "--d-model N" if role == "ratio" else f"{option(row.option)} N"
        raise FFNError(f"{signature_text(cls)} needs {name}", f"give {needed}")
    out.taken.append(f"{name} = {row.otherwise}")
    return row.otherwise


class Settings(dict[str, Any]):
    """A `config` argument, read as a dict or by attributes."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"no option sets the config's {name}: {_INSTANCE}", name=name, obj=self)

    def __missing__(self, name: str) -> Any:
        raise LookupError(f"no option sets the config's {shown(name)}: {_INSTANCE}")


_INSTANCE = "name an instance, as in my.py:block"


def _config(p: Parameter, values: Mapping[str, Any], form: Form, out: Filled) -> Any:
    """Return a `config` argument: an instance of its annotated class, else `Settings` with every usual name."""
    cls = p.annotation if inspect.isclass(p.annotation) and p.annotation is not p.empty else dict
    filled = not (is_typeddict(cls) or cls is SimpleNamespace or issubclass(Settings, cls))
    arguments = _signature(cls).parameters if filled else {}
    by_name = any(a.kind is a.VAR_KEYWORD for a in arguments.values()) and not any(_roles([*arguments]).values())
    if filled and not by_name:
        inner = _fill(cls, values, form)
        out.used |= inner.used
        out.taken += inner.taken
        out.formed = out.formed or inner.formed
        return cls(*inner.positional, **inner.named)
    if "d_model" not in values:
        raise FFNError(f"the argument {p.name} needs a width", "give --d-model N")
    by_role = _with_widths({"d_ff": "4x", **values}, {})
    out.used |= {role.option for role in ROLES}
    out.taken += [] if "d_ff" in values else ["d_ff = 4x"]
    settings = {role.option: by_role.get(role.option, role.otherwise) for role in ROLES}
    settings["activation"], out.formed = form(settings["activation"]), "activation" in values
    names = {name: settings[role.option] for role in ROLES for name in role.names if settings[role.option] is not None}
    return cls(**names) if by_name else Settings(names)


def _roles(names: list[str]) -> dict[str, str | None]:
    """Return each argument's role; a name for either width gets the width that no other argument has."""
    table = {_plain(name): row.option for row in reversed(ROLES) for name in row.names}
    roles = {name: table.get(_plain(name)) for name in names}
    either = [name for name in names if _plain(name) in map(_plain, _EITHER)]
    if len(either) == 1:
        others = {role for name, role in roles.items() if name != either[0]}
        if "d_model" in others and not others & {"d_ff", "ratio"}:
            roles[either[0]] = "d_ff"
        elif others & {"d_ff", "ratio"} and "d_model" not in others:
            roles[either[0]] = "d_model"
    return roles


def _plain(name: str) -> str:
    return name.lower().replace("_", "")


def _function(name: str) -> Any:
    return function(activations.resolve(name)[0])


def _signature(cls: type[Any]) -> inspect.Signature:
    try:
        return inspect.signature(cls, eval_str=True)
    except Exception:  # an annotation that cannot be evaluated does not matter
        return inspect.signature(cls)


_TRITON_WITHOUT_GPU = "0 active drivers"
_ON_A_CPU = "Triton sees no GPU; with TRITON_INTERPRET=1 in the environment, ffn verify runs its kernels on a CPU"


@contextmanager
def user_code(path: Path, doing: str) -> Iterator[None]:
    """A context for running the user's code in `path`: it can import neighbouring files and its package, its output
    goes to stderr, and its exceptions become one FFNError.

    Output to file descriptor 1, to which C code and child processes write, is also redirected. Afterwards the
    directories are removed from sys.path and the neighbours from sys.modules, since another source's neighbours may
    have the same names. Out-of-memory errors are not converted.
    """
    before = set(sys.modules)
    root, package = _package(path)
    folders = [str(root), str(path.parent)] if package else [str(path.parent)]
    added = [Path(folder) for folder in folders if folder not in sys.path]
    sys.path[:0] = folders
    try:
        with _descriptor_1_to_2(), redirect_stdout(sys.stderr):
            yield
    except (MemoryError, FFNError, KeyboardInterrupt, Terminated, OutOfTime):
        raise
    except BaseException as error:  # includes SystemExit
        if "can't allocate memory" in str(error):
            raise
        raise FFNError(_located(error, path), doing) from error
    finally:
        for folder in folders:
            if folder in sys.path:
                sys.path.remove(folder)
        _forget_neighbours({path.parent, *added}, before)


def _package(path: Path) -> tuple[Path, str]:
    """Return (the folder from which the file's package is imported, the package's dotted name); for a file of no
    package, its own folder and an empty name."""
    folder, names = path.parent, []
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        names.append(folder.name)
        folder = folder.parent
    return folder, ".".join(reversed(names))


@contextmanager
def _descriptor_1_to_2() -> Iterator[None]:
    """Redirect descriptor 1 to 2 (to /dev/null if 2 is closed), and restore both afterwards."""
    _flush()
    open_1, open_2 = _is_open(1), _is_open(2)
    if not open_2:  # open 2 first, so that the copy of 1 below does not become descriptor 2
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        if nowhere != 2:
            os.close(nowhere)
    before = os.dup(1) if open_1 else None
    os.dup2(2, 1)
    try:
        yield
    finally:
        _flush()
        if before is None:
            os.close(1)
        else:
            os.dup2(before, 1)
            os.close(before)
        if not open_2:
            os.close(2)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _flush() -> None:
    """Flush the output that Python and C have buffered for descriptor 1 to its current target."""
    for stream in (sys.stdout, sys.__stdout__):
        with suppress(OSError, ValueError):  # a broken stream is reported when the command writes its own output
            if stream is not None:
                stream.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)


def import_file(path: Path, form: str = "my.py:ClassName") -> ModuleType:
    """Import the file, as a part of its package, under a name that no import statement can use; `form` is the hint if
    the file is missing."""
    where = shown_path(path)
    if not os.path.isfile(path):  # Path.is_file raises for a name that is too long
        raise FFNError(f"{where} " + ("is a directory" if os.path.isdir(path) else "does not exist"), f"give {form}")
    _, package = _package(path)
    name = ".".join([*filter(None, [package]), "ffn source " + re.sub(r"\W", "_", str(path))])
    spec = spec_from_file_location(name, path, loader=FromSource(name, str(path)))
    assert spec is not None  # never None with a loader
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module while it is executed
    with user_code(path, "raised while it was imported"):
        spec.loader.exec_module(module)
    sys.modules[name] = module  # it stays although its package is forgotten
    return module


def pick(module: ModuleType, name: str | None, path: Path) -> Any:
    """Return the class or instance `name` in the user's file; if `name` is None, the file's only nn.Module class."""
    where = shown_path(path)
    classes = [n for n, value in vars(module).items() if _is_class(value) and value.__module__ == module.__name__]
    there = "its nn.Module classes: " + ", ".join(classes) if classes else "it has no nn.Module class"
    if name is None:
        if not classes:
            raise FFNError(f"{where} has no nn.Module class", "give my.py:ClassName")
        if len(classes) > 1:
            raise FFNError(
                f"{where} has {len(classes)} nn.Module classes", f"name one, as in {path.name}:{classes[0]}; {there}"
            )
        name = classes[0]
    if name not in vars(module):
        lower = {n.lower(): n for n in classes}
        near = did_you_mean(name, list(lower), there)
        raise FFNError(f"{where} has no {shown(name)}", re.sub(r"'(\w+)'", lambda m: f"'{lower[m[1]]}'", near))
    target = vars(module)[name]
    if not (is_class(target) or is_instance(target)):
        hint = (
            there if classes else "give an nn.Module class, or a class with __call__ that keeps weights as attributes"
        )
        hint += f"; a function is a kernel: ffn verify -k {path.name}:{name}" if inspect.isroutine(target) else ""
        raise FFNError(f"{where}: {name} is not an nn.Module class (it is {kind_of(target)})", hint)
    return target


def kind_of(value: object) -> str:
    """Describe a value other than an nn.Module in words."""
    return "a class without __call__ or forward" if inspect.isclass(value) else f"a {type(value).__name__}"


def _is_class(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, nn.Module)


def _located(error: BaseException, path: Path) -> str:
    """Describe an exception: `my.py, line 7: ValueError: d_model must be even`."""
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines.append(error.lineno)
    at = f", line {lines[-1]}" if lines else ""
    if _TRITON_WITHOUT_GPU in str(error):
        return f"{shown_path(path)}{at}: {_ON_A_CPU}"
    if isinstance(error, ImportError) and "relative import" in str(error):
        return f"{shown_path(path)}{at}: {error}: every folder of a package needs an __init__.py"
    text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    text = text if len(text) <= 200 else text[:199] + "…"
    return f"{shown_path(path)}{at}: {type(error).__name__}" + (f": {text}" if text else "")


def _forget_neighbours(folders: Collection[Path | None], before: set[str]) -> None:
    """Forget the modules that were imported from `folders` and are not in `before`, and their submodules."""
    new = {name for name in set(sys.modules) - before if name.partition(".")[0] not in before}
    tops = {name for name in new if "." not in name and _home(sys.modules[name]) in folders}
    for name in new:
        if name.partition(".")[0] in tops:
            del sys.modules[name]


def _home(module: ModuleType) -> Path | None:
    """Return the directory from which a module was imported; for a package, the directory that contains it."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return None
    return Path(file).parents[1 if os.path.basename(file) == "__init__.py" else 0]
