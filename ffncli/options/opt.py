"""An option is a field of a record: `tokens: Annotated[int | None, Opt("-n", "--tokens", accepts=COUNT, ...)] = None`.

That one line defines both the command line's option, with its help, completion and error (`cli/common/spread.py`), and
the argument of the library's call, with its type and default (`call`).
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast, get_args, get_type_hints

from ffncli.options.accept import FLAG, TEXT, Accepts, converted
from ffncli.options.arguments import bound

SOURCE, INPUT, COMPUTE, OUTPUT, HELP = "Source and dimensions", "Input", "Compute", "Output", "Help"

_OPTIONS: "dict[type[Any], Mapping[str, Opt]]" = {}
_ACCEPTED: "dict[type[Any], Mapping[str, Accepts[Any]]]" = {}
_KNOWN: "dict[str, Opt]" = {}  # field name → option, for every option seen by this process
P = ParamSpec("P")
Q = TypeVar("Q")
R = TypeVar("R")


class Opt:
    """The definition of one option. `names` are its names in a shell (none for a positional argument); in Python the
    option has the name of its field.

    `accepts` converts both strings from a shell and Python values (default: a string, or a flag for bool). `metavar` is
    the placeholder for the value (default: that of `accepts`), `help` describes the option in the help. The help lists
    the option in `group`, or right `after` the option of another field; `daily` options also appear in the short help.
    `repeat`: the option may be given several times; this is implied if `accepts` takes several values, except for a
    positional argument. `flag`: in a shell the option is a switch, even if Python accepts more. `completes` names lists
    of values for shell completion (`cli/common/spread.py`); `eager` options are processed before all others.
    """

    def __init__(
        self,
        *names: str,
        help: str,
        accepts: Accepts[Any] | None = None,
        metavar: str | None = None,
        group: str = OUTPUT,
        daily: bool = False,
        after: str = "",
        repeat: bool = False,
        flag: bool = False,
        completes: str | None = None,
        eager: bool = False,
    ) -> None:
        self.names = names
        self.help = help
        self.accepts = accepts
        self.metavar = metavar or (accepts.metavar if accepts else None)
        self.group = group
        self.daily = daily
        self.after = after
        self.repeat = repeat or bool(names and accepts and accepts.repeat)
        self.flag = flag
        self.completes = completes
        self.eager = eager

    @property
    def spelling(self) -> str:
        """The option's name in a shell's error messages: its first long name, `--tokens`, or SOURCE if positional."""
        names = [text.partition("/")[0] for text in self.names]
        return next((name for name in names if name.startswith("--")), names[0] if names else self.metavar or "")

    @property
    def opposite(self) -> str:
        """The name that turns a flag off, `--plain`; "" if there is no such name."""
        return next((text.partition("/")[2] for text in self.names if "/" in text), "")


@dataclass(frozen=True)
class Options:
    """A record whose fields are options. Creating it converts every field from a shell's string or from a Python value.

    A field that only the library has is annotated with what it `Accepts`, without an Opt. None stands for the field's
    default, unless None is a value of the field.
    """

    def __post_init__(self) -> None:
        defaults = _defaults(type(self))
        for name, accepts in _accepted(type(self)).items():
            value, default = getattr(self, name), defaults[name]
            if value is None and not accepts.none:
                value = default
            object.__setattr__(self, name, value if value is default else converted(name, value, accepts))


def options_of(record: type[Any]) -> Mapping[str, Opt]:
    """Return the options of a record, keyed by field: those that the record declares, then those of its bases."""
    if record not in _OPTIONS:
        hints = get_type_hints(record, include_extras=True)
        options: dict[str, Opt] = {}
        accepted: dict[str, Accepts[Any]] = {}
        for field in _fields(record):
            kind, *extras = get_args(hints[field.name]) or (None,)
            for extra in extras:
                if isinstance(extra, Opt):
                    extra.accepts = extra.accepts or (FLAG if bool in (kind, *get_args(kind)) else TEXT)
                    options[field.name] = _KNOWN[field.name] = extra
                accepts = extra.accepts if isinstance(extra, Opt) else extra
                if isinstance(accepts, Accepts):
                    accepted[field.name] = accepts
        _OPTIONS[record], _ACCEPTED[record] = options, accepted
    return _OPTIONS[record]


def _accepted(record: type[Any]) -> Mapping[str, Accepts[Any]]:
    """Return what each field of a record accepts."""
    options_of(record)
    return _ACCEPTED[record]


def speak_of(record: type[Any]) -> None:
    """From now on, spell options in errors as this record declares them; another record may declare a field of the same
    name differently."""
    _KNOWN.update(options_of(record))


def as_typed(name: str, value: str | None) -> str:
    """Return an option as typed in a shell, `--norm none`, from its field's name and the repr of a value."""
    opt = _KNOWN.get(name)
    spelling = opt.spelling if opt else f"--{name.replace('_', '-')}"
    if value is None or value == "True":
        return spelling
    if value == "False":
        return (opt and opt.opposite) or f"--no-{name.replace('_', '-')}"
    return f"{spelling} " + (value[1:-1] if value[:1] in "'\"" else value)


def _fields(record: type[Any]) -> list[Field[Any]]:
    """Return the fields of a record: those that it declares or redefines itself, then those of its bases."""
    names = [name for kind in record.__mro__ for name in vars(kind).get("__annotations__", {})]
    places = {name: place for place, name in enumerate(names)}
    return sorted(fields(record), key=lambda field: places[field.name])


def _defaults(record: type[Any]) -> Mapping[str, Any]:
    made = {f.name: f.default_factory() for f in fields(record) if f.default_factory is not MISSING}
    return {f.name: None if f.default is MISSING else f.default for f in fields(record)} | made


def chosen(record: Options) -> tuple[str, ...]:
    """Return the names of the fields whose values differ from their defaults, in order; values may be tensors."""
    defaults = _defaults(type(record))
    names = [(name, getattr(record, name)) for name in options_of(type(record))]
    # Arrays are never at their default, and `!=` would compare them element by element.
    return tuple(name for name, value in names if hasattr(value, "__array__") or value != defaults[name])


def call(
    question: Callable[P, Q], run: Callable[[Q], R], name: str, elsewhere: Mapping[str, str] | None = None
) -> Callable[P, R]:
    """Return the library's function `name`, which takes the fields of `question` as arguments and runs the question.

    `elsewhere` maps an argument that belongs to another function to a hint.

    >>> from ffncli.run.trace.call import trace  # trace = call(Question, session_for, "trace")
    """

    @wraps(question, assigned=("__doc__", "__module__"), updated=())
    def ask(*args: P.args, **kwargs: P.kwargs) -> R:
        bound(signature, name, args, kwargs, elsewhere or {})
        return run(question(*args, **kwargs))

    ask.__name__ = ask.__qualname__ = name
    signature, order = inspect.signature(question), [field.name for field in _fields(cast(type[Any], question))]
    types = get_type_hints(question)  # without the Opt annotations
    parameters = [one.replace(annotation=types[one.name]) for one in signature.parameters.values()]
    parameters.sort(key=lambda one: (one.kind, order.index(one.name)))
    result = run.__annotations__.get("return", inspect.Signature.empty)
    ask.__signature__ = signature.replace(parameters=parameters, return_annotation=result)  # type: ignore[attr-defined]
    return ask
