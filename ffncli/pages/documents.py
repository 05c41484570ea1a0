"""Turn JSON answers into sections of a page. `ffn trace --layer all`, `ffn trace --prompts` and `ffn experts` get
charts over the layers; every other answer with `rows` gets a table. `ffn verify` and `ffn compare` also get records."""

from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from sys import float_info
from typing import Any

from ffncli.errors import FFNError, shown, shown_path
from ffncli.models.files.strict_json import read_object
from ffncli.pages.checkpoints import checkpoint_charts
from ffncli.pages.precision import precision_charts
from ffncli.run.verify.certificate import certificate_of
from ffncli.show.page.charts import ChartLine, lines
from ffncli.show.page.document import Child, PageParts, Section, definitions, element
from ffncli.show.parts import is_number

_MOST_BYTES = 50_000_000
_TITLES = {"verify": "verified", "compare": "compared", "bench": "results"}
# Charts: the title, the unit of the y axis, and the keys; each key is drawn as one line, if it is in the rows.
_FRAMES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Norms of a token", "mean L2 norm", ("input_norm", "output_norm")),
    ("Shares", "share", ("zero_share", "near_zero_share", "active_share", "dead_share", "busiest_share")),
    ("Minimum and maximum after the activation", "value", ("min", "max")),
    ("Entropy of the experts' load", "bits", ("entropy_bits", "max_entropy_bits")),
    ("Difference from the model's own FFN", "relative error", ("relative_error",)),
)
_Rows = Sequence[Mapping[str, Any]]


def document_parts(path: Path, name: str) -> PageParts:
    """Return the section of one JSON answer. Raises FFNError for any other JSON."""
    values = read_object(path, _MOST_BYTES)
    command, rows, corpus = values.get("command"), values.get("rows"), values.get("corpus")
    budget = values.get("budget") if command == "precision" else None
    rows = budget.get("choices") if isinstance(budget, Mapping) else rows
    layers: Any = (corpus if command == "trace" and isinstance(corpus, Mapping) else values).get("layers")
    wanted = (
        isinstance(layers, list)
        and layers
        and all(isinstance(row, dict) and _is_finite(row.get("layer")) for row in layers)
    )
    if wanted and command in ("trace", "experts"):
        return _layer_parts(path, name, layers, values.get("model"))
    word = command if isinstance(command, str) and command.isalpha() else ""
    if not word or not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        what = f"the JSON of ffn {word}, without rows" if word else "not an answer of ffn"
        raise FFNError(
            f"{shown_path(path)} is {what}",
            "a page is made from results, saved traces, ffn trace --layer all or --prompts, and answers with rows",
        )
    if "certificate" in values:
        certificate_of(values, shown_path(path))
    children: list[Child] = []
    for key in ("certificate", "block"):
        if isinstance(record := values.get(key), Mapping):
            children += [element("h3", key.capitalize()), _record(record)]
    if command == "compare" and isinstance(values.get("findings"), list):
        children += checkpoint_charts(values, rows)
    if command == "precision":
        children += precision_charts(rows, budget)
    children += [element("h3", "Rows"), element("div", data_table=name)]
    title = f"{path.name}: {_TITLES.get(word, f'ffn {word}')}"
    lists = {key for row in rows for key, value in row.items() if isinstance(value, list)}
    return PageParts((Section(f"{name}-section", title, tuple(children)),), {name: _table(rows, lists)})


def _record(record: Mapping[str, Any]) -> Child:
    """List a record's fields with their values, including the fields of nested records."""
    fields = [
        pair
        for key, value in record.items()
        for pair in (value.items() if isinstance(value, Mapping) else [(key, value)])
        if pair[1] not in (None, "", [])
    ]
    return definitions((str(key), _text(value)) for key, value in fields)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return shown(value) if isinstance(value, list) else str(_cell(value))


def _table(rows: _Rows, left_out: Container[str]) -> dict[str, Any]:
    """Return the rows as a table, without keys that hold a record in any row; a list becomes a string."""
    keys = [
        key
        for key in dict.fromkeys(key for row in rows for key in row)
        if key not in left_out and not any(isinstance(row.get(key), dict) for row in rows)
    ]
    return {"columns": keys, "rows": [[_cell(row.get(key)) for key in keys] for row in rows]}


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        words = (str(one["unit"] if isinstance(one, Mapping) and "unit" in one else one) for one in value[:8])
        return ", ".join(words) + (" …" if len(value) > 8 else "")
    return "yes" if value is True else "no" if value is False else value


def _is_finite(value: object) -> bool:
    """Return whether a value is a number that a float can hold; integers in JSON have no limit."""
    return is_number(value) and abs(value) <= float_info.max  # type: ignore[arg-type]


# --- over the layers --------------------------------------------------------------------------------------------------


def _layer_parts(path: Path, name: str, rows: _Rows, model: object) -> PageParts:
    """Return the section about layers: charts over the layers, the load of experts, and a table."""
    drawn = []
    for row in rows:  # add the figures of the layer's routing, and the layer's share of dead units
        routing, units, dead = row.get("routing"), row.get("units"), row.get("dead_units")
        more = {**routing} if isinstance(routing, Mapping) else {}
        if units and dead is not None and _is_finite(units) and _is_finite(dead):
            more["dead_share"] = dead / units
        drawn.append({**row, **more})
    children: list[Child] = []
    for title, up, keys in _FRAMES:
        if series := _series(drawn, keys):
            positive = all(y > 0 for one in series for _, y in one.points)
            log = positive and up in ("mean L2 norm", "relative error")
            children += [element("h3", title), lines(series, "layer", up, log_x=False, log_y=log)]
    data: dict[str, Any] = {name: _table(drawn, ("experts", "top_units", "outliers"))}
    if loads := [_loads(row) for row in rows if _loads(row)]:
        data[f"{name}-load"] = _load_map(rows, loads)
        children += [element("h3", "Tokens per expert"), element("div", data_heat=f"{name}-load")]
    children += [element("h3", "Layers"), element("div", data_table=name)]
    label = model.get("name") if isinstance(model, Mapping) else None
    title = f"{label or path.name}: {len(rows)} layers"
    return PageParts((Section(f"{name}-section", title, tuple(children)),), data)


def _series(rows: _Rows, keys: Iterable[str]) -> list[ChartLine]:
    """Return a line for each key and stack."""
    stacks = list(dict.fromkeys(str(row.get("stack", "")) for row in rows))
    out = []
    for key in keys:
        for stack in stacks:
            some = [row for row in rows if str(row.get("stack", "")) == stack and _is_finite(row.get(key))]
            points = [(float(row["layer"]), float(row[key])) for row in some]
            name = key.replace("_", " ") + (f", {stack}" if len(stacks) > 1 else "")
            if points and (key not in ("relative_error", "near_zero_share") or any(y for _, y in points)):
                out.append(ChartLine(name, points, labels=[f"{name}, layer" for _ in points]))
    return out


def _loads(row: Mapping[str, Any]) -> list[float]:
    """Return the number of tokens that each routed expert of a layer receives."""
    routing = row.get("routing")
    loads = routing.get("tokens_per_expert") if isinstance(routing, Mapping) else None
    if not isinstance(loads, list):
        experts = row.get("experts")
        loads = [e.get("tokens") for e in experts if isinstance(e, Mapping)] if isinstance(experts, list) else []
    return [float(load) for load in loads if _is_finite(load)]


def _load_map(rows: _Rows, loads: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return a heat map with a column per expert and a row per layer; layers whose number of experts differs from the
    first layer's are left out."""
    import torch

    from ffncli.pages.traces import heat_data

    alike = [load for load in loads if len(load) == len(loads[0])]
    labels = [f"{row.get('stack', '')} {row['layer']}" for row in rows if len(_loads(row)) == len(loads[0])]
    return {**heat_data("tokens", torch.tensor(alike)), "rows": labels}
