"""`spread` lets a command declare options, and records of options, as parameters; Typer sees all of them, the records'
fields included, as the command's own options.

A field's `Opt` says how the option is typed; creating the record converts the typed values. If two records have a field
of the same name, the field is one option, and both records get its value. The first record declares the option; the
last record determines its position. -h and --help are the last options of every command.

This module also provides the values for shell completion, in lists with the names that `Opt.completes` uses; a list's
module is imported only when a shell requests the list.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, make_dataclass
from functools import wraps
from importlib import import_module
from typing import Annotated, Any, get_args, get_type_hints

import typer

from ffncli.cli.common.help import HELP_OPTIONS, Daily
from ffncli.options.accept import FLAG
from ffncli.options.opt import Opt, Options, options_of, speak_of


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with every parameter that is a record of options replaced by the record's fields."""
    hints = get_type_hints(command, include_extras=True)
    parameters: dict[str, inspect.Parameter] = {}
    records: dict[str, type[Options]] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        if any(isinstance(one, Opt) for one in get_args(hints[name])):  # a single option: a record of one field
            records[name] = make_dataclass(
                name, [(name, hints[name], parameter.default)], bases=(Options,), frozen=True
            )
        elif hasattr(hints[name], "__dataclass_fields__"):
            records[name] = hints[name]
        else:
            parameters[name] = _parameter(name, hints[name], parameter.default)
            continue
        defaults = {f.name: f.default for f in fields(records[name])}
        for field, opt in options_of(records[name]).items():
            parameters[field] = parameters.pop(field, _typed(field, opt, defaults[field]))
    names, before = [*parameters], list[str]()
    while names != before:  # repeat, since an option may follow another option that moves later
        names, before = _placed(names, records.values()), names
    parameters = {name: parameters[name] for name in names}
    parameters |= {name: _parameter(name, hint, False) for name, hint in HELP_OPTIONS.items()}

    @wraps(command)
    def run(**typed: Any) -> None:
        for record in records.values():
            speak_of(record)
        made = {name: record(**_given(record, typed)) for name, record in records.items()}
        single = {name: getattr(one, name) for name, one in made.items() if type(one) is not hints[name]}
        command(**{name: typed[name] for name in hints if name in typed and name not in made} | made | single)

    run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters.values()}
    del run.__wrapped__  # otherwise Typer would inspect the original
    return run


def _placed(names: list[str], records: Iterable[type[Options]]) -> list[str]:
    """Move each field that declares `after` to directly behind the field that `after` names."""
    for record in records:
        for field, opt in options_of(record).items():
            if opt.after in names:
                names = [name for name in names if name != field]
                names.insert(names.index(opt.after) + 1, field)
    return names


def _given(record: type[Options], typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the typed values of the record's fields; if a repeatable option was given once, its list is unwrapped."""
    values = {name: typed[name] for name in options_of(record)}
    return {n: v[0] if isinstance(v, list) and len(v) == 1 else v for n, v in values.items()}


def _typed(name: str, opt: Opt, default: Any) -> inspect.Parameter:
    """Return a field as a Typer parameter: a flag, or a string that the record converts later."""
    words = opt.accepts.values if opt.accepts else ()
    completion = (lambda: values(opt.completes) if opt.completes else list(words)) if opt.completes or words else None
    flag = opt.flag or opt.accepts is FLAG
    kind: Any = bool | None if flag else list[str] | None if opt.repeat else str | None
    if not opt.names:
        argument = typer.Argument(metavar=opt.metavar, help=opt.help, autocompletion=completion)
        return _parameter(name, Annotated[kind, argument], MISSING if default is MISSING else None)
    panel = Daily(opt.group) if opt.daily else opt.group
    shown = typer.Option(
        *opt.names, metavar=opt.metavar, help=opt.help, rich_help_panel=panel, is_eager=opt.eager,
        autocompletion=completion,
    )  # fmt: skip
    if flag:
        on_only = opt.flag or default is False
        return _parameter(name, Annotated[bool if on_only else kind, shown], False if opt.flag else default)
    plain = isinstance(default, str | int | float)
    return _parameter(name, Annotated[kind, shown], str(default) if plain and default != "" else None)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    empty = inspect.Parameter.empty
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=empty if default is MISSING else default, annotation=annotation
    )


# name → (module, attribute of the module, function from the attribute to the values)
_LISTS: dict[str, tuple[str, str, Callable[[Any], Iterable[str]]]] = {
    "models": ("ffncli.models.catalog", "names", lambda names: names()),
    "devices": ("ffncli.system.hardware", "typed_names", lambda names: names()),
    "skews": ("ffncli.models.counting.expert_load", "UNIFORM", lambda uniform: [uniform, "zipf:1.2"]),
    "links": ("ffncli.system.hardware", "links", lambda links: [link.name for link in links()]),
    "gates": ("ffncli.block.activations", "GATED", list),
    "limited": ("ffncli.block.activations", "UNITS_WITH_LIMITS", list),
    "functions": ("ffncli.block.activations", "TABLE", list),
    "kernels": ("ffncli.kernels", "BUILT_IN", lambda built_in: [*built_in, "auto"]),
    "forms": ("ffncli.run.export.call", "FORMS", list),
    "parts": ("ffncli.run.export.problem", "Part", get_args),
    "examples": ("ffncli.models.examples", "EXAMPLES", list),
    "checks": ("ffncli.run.verify.question", "CHECK_STATEMENTS", list),
    "targets": ("ffncli.run.approximate.question", "TARGETS", list),
    "dtypes": ("ffncli.block.dtypes", "TABLE", lambda rows: [row.name for row in rows]),
    "stored": ("ffncli.block.dtypes", "STORED", lambda rows: [row.name for row in rows]),
    "rounding": ("ffncli.block.analysis.rounding", "FORMATS", list),
    "norms": ("ffncli.block.recipe", "NormKind", get_args),
    "norm_positions": ("ffncli.block.recipe", "NormPosition", get_args),
    "suites": ("ffncli.bench.request.suite", "SUITES", list),
    "launchers": ("ffncli.bench.request.machines", "LauncherName", get_args),
    "findings": ("ffncli.run.checkpoints.results", "FINDINGS", list),
    "formats": ("ffncli.show.output", "Format", get_args),
    "colors": ("ffncli.show.color", "COLORS", list),
}


def values(names: str) -> list[str]:
    """Return the values of one list, or of several: `functions gates`."""
    lists = (_LISTS[name] for name in names.split())
    return [value for module, name, read in lists for value in read(getattr(import_module(module), name))]
