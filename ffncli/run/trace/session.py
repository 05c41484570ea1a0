"""Running a trace: `session_of` answers a question with a Session, one record of all results.

Modules that few questions need are imported inside functions, which saves a tenth of a plain trace's start-up time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ffncli.block.analysis.flow import flow
from ffncli.block.steps import Step, ffn_span, ffn_sum, routes
from ffncli.errors import FFNError, option, spelled
from ffncli.models.model import Resolved
from ffncli.options import conflicts
from ffncli.run.corpus.question import TABLES
from ffncli.run.corpus.results import save_table
from ffncli.run.engine.backward import forward
from ffncli.run.engine.changes import NoUnit
from ffncli.run.engine.execute import execute
from ffncli.run.engine.prepare import BlockSummary, Prepared, Token, block_summary, prepare
from ffncli.run.engine.router_losses import routers
from ffncli.run.engine.trace import StepRecord, Trace, find_not_finite, trace
from ffncli.run.explain.place import StepIndex
from ffncli.run.measure.gap import Agreement, agreement
from ffncli.run.measure.statistics import NotFinite, cells_of, largest, values_of_a_cell
from ffncli.run.ranks.environment import follows, torchrun
from ffncli.run.trace.question import TERMS, TOP_TOKENS, Question, TraceSubject
from ffncli.run.trace.routing import Chosen, Routing, Sampling, chosen_experts, routing_of, sampling
from ffncli.run.trace.step_question import STEP_RULES, StepOptions
from ffncli.system.notebook import record_table
from ffncli.system.packages import package_errors

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped]

    from ffncli.run.explain.explain import Explanation
    from ffncli.run.pretrained.patch import Patch
    from ffncli.run.pretrained.what_if import PredictionChange, StepChange
    from ffncli.run.ranks.one_process import RankTrace
    from ffncli.run.texts.fact import Fact
    from ffncli.run.trace.training_step import TrainingStep
    from ffncli.run.trace.unembed import PromotedTokens, PromotingUnits


_MOST_LINES = 8  # lines of a session's repr
Note = Callable[[str], None]


@dataclass(frozen=True)
class ModelRun:
    """A run of a real model: its prompt, the traced `tokens`, and how well the steps agree with the model's FFN."""

    prompt: str | None
    tokens: tuple[Token, ...]
    agreement: Agreement


class Explained(tuple["Explanation", ...]):
    """The requested explanations. Calling it explains one more element of a finished session, without a new run of the
    model: `session.explain("up", 0, 3)`."""

    session: Session

    def __call__(self, name: str, *index: int, terms: int = TERMS) -> Explanation:
        """Explain the element `index` of the step `name` with its largest terms. Raises FFNError if there is none."""
        from ffncli.run.explain.explain import explain
        from ffncli.run.explain.scene import Scene, find, needed

        session, prepared = self.session, self.session.prepared
        names = needed(prepared.steps, [find(prepared.steps, name).name])
        known = {**prepared.inputs, **session.tensors}
        if missing := names - set(known):
            if prepared.mode.train:
                raise FFNError(f"the tensor of '{min(missing)}' was not kept", f"call trace with explain='{name}[...]'")
            with torch.no_grad():
                events = execute(prepared.steps, prepared.weights, prepared.inputs, prepared.mode, names)
                known |= {event.name: event.tensor for event in events if event.name in names}
        return explain(Scene(prepared.steps, prepared.weights, known, prepared.mode), name, index, terms)[0]


@dataclass(frozen=True, repr=False, eq=False)
class Session:
    """All results of one trace, under the keys of docs/commands/trace.md; anything not requested is None or empty.

    `session["act"]` is a step's tensor, `session.step("act")` the step's record and `session.frame("act")` its values
    as rows; `tensors` contains the complete tensors that were kept, by step name. `prepared` contains the layer, its
    steps, weights and inputs as they ran; `mask_state` is its generator's state before dropout drew masks. `notes` are
    the remarks on the run, in order.
    """

    question: Question
    model: Resolved
    prepared: Prepared
    block: BlockSummary
    trace: Trace
    not_finite: tuple[NotFinite, ...]
    flow: tuple[str, ...]
    model_run: ModelRun | None = None
    routes: tuple[Chosen, ...] = ()
    routing: Routing | None = None
    unembed: tuple[PromotedTokens, ...] | None = None
    promotes: tuple[PromotingUnits, ...] | None = None
    sampling: tuple[Sampling, ...] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    facts: tuple[Fact, ...] | None = None
    explain: Explained = field(default_factory=lambda: Explained())
    changes: tuple[StepChange, ...] | None = None
    prediction: PredictionChange | None = None
    patch: Patch | None = None
    over_ranks: RankTrace | None = None
    training_step: TrainingStep | None = None
    subject: TraceSubject | None = None
    mask_state: Tensor | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.explain.session = self

    @property
    def ffn_input(self) -> str:
        """The name of the tensor that enters the FFN."""
        return self.trace.ffn_input

    @property
    def ffn_output(self) -> str:
        """The name of the tensor that leaves the FFN."""
        return self.trace.ffn_output

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        """The record of every intermediate in order, the block's inputs first."""
        return self.trace.steps

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The complete tensors that were kept, by their printed names."""
        return self.trace.tensors

    @property
    def tokens(self) -> tuple[Token, ...]:
        """The tokens of the prompt, one per row of the input; empty if there is no prompt."""
        return self.prepared.tokens

    def step(self, name: str) -> StepRecord:
        """Return the record of the step `name`."""
        return self.trace.step(name)

    def __getitem__(self, name: str) -> Tensor:
        """Return the complete tensor of a step, by its printed name. A tensor that was not kept is computed again.

        Raises FFNError for a tensor that was not kept if dropout was active, because another run would draw another
        mask.
        """
        self.step(name)
        prepared = self.prepared
        known = {**prepared.inputs, **self.tensors}
        if name in known:
            return known[name]
        if prepared.mode.train:
            raise FFNError(f"the tensor of '{name}' was not kept", f"call trace with keep=['{name}']")
        with torch.no_grad():
            keep = frozenset([name])
            events = execute(prepared.steps, prepared.weights, prepared.inputs, prepared.mode, keep)
            return next(event.tensor for event in events if event.name == name)

    def backward(self, **options: Any) -> TrainingStep:
        """Return the gradients of every step and weight; the options are those of `ffn trace --backward`: `loss`,
        `target`, `lr` and `kernel`.

        >>> import ffncli
        >>> step = ffncli.trace("4x8:relu", input=[1, 2, 3, 4]).backward(loss="mse", lr=0.1)
        >>> step["up.weight"].shape, step.gradient("up").formula
        (torch.Size([8, 4]), "d act ⊙ relu'(up)")
        """
        from ffncli.run.trace.training_step import training_step

        asked = StepOptions(backward=True, **options)
        conflicts.check(STEP_RULES, asked, {} if self.model_run is None else {"prompt": self.model_run.prompt})
        if self.subject is not None and self.subject.prompt is not None:
            question, everything = (
                replace(self.question, backward=True, lr=asked.lr),
                replace(self.subject, experts=None),
            )
            return _training_step(question, everything, self.prepared, None)
        return training_step(self.model, self.prepared, asked, self.question.values_shown, None, self.mask_state)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the steps: `{name: session[name] for name in session}`."""
        return (record.name for record in self.steps)

    def __contains__(self, name: object) -> bool:
        return any(record.name == name for record in self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def heat_map(self, name: str, rows: int, columns: int) -> tuple[list[list[float]], int]:
        """Return (a step's values as a grid of at most `rows` × `columns` cells, the largest number of values in one
        cell). Each cell shows its value with the largest magnitude, or NaN if it contains NaN."""
        x = self[name].flatten(0, -2).double()
        cells = cells_of(x, rows, columns)
        return [[largest(cell) for cell in line] for line in cells], values_of_a_cell(x, cells)

    def frame(self, step: str = "act") -> DataFrame:
        """Return a step's values as a pandas DataFrame: each value is a row of `layer`, `token`, `unit` and `value`.

        `token` is the position in the prompt, or the row of the flattened input; `layer` is 0 for a bare block.
        """
        return step_frame(self[step], self.step(step).tokens, self.tokens, self.prepared.layer.index)

    def plot(self, step: str = "act") -> Figure:
        """Return a matplotlib figure: the step's values as a heat map, whose colours end at the 99th percentile, with a
        row per token. A cell of several values shows the largest. Raises FFNError (exit 3) without matplotlib."""
        from ffncli.run.measure.statistics import percentile, span
        from ffncli.show.plots.image import figure
        from ffncli.show.plots.plot import MapPlot

        cells, each = self.heat_map(step, 24, 72)
        values = self[step].flatten(0, -2).double()
        names = [f"{token.position} {token.text or token.id}" for token in self.tokens]
        if len(names) != len(values):
            names = [str(row) for row in range(len(values))]
        rows = [names[span(at, len(values), len(cells)).start] for at in range(len(cells))]
        across = f"{values.shape[1]} values" + (f", a cell is the largest of up to {each}" if each > 1 else "")
        limit = percentile(values[values.isfinite()].abs()) or 1.0
        record = self.step(step)
        title = f"{step} = {record.formula}" if record.inputs else step
        return figure([MapPlot(title, across, "token", rows, cells, limit)])

    def __repr__(self) -> str:
        shown = self.steps if len(self.steps) < _MOST_LINES else self.steps[: _MOST_LINES - 2]
        ends = ["" if r.min is None else f"  {r.min:.4g} to {r.max:.4g}" for r in shown]
        lines = [f"  {r.name:<8}  {[*r.shape]!s:<14} {r.dtype}{e}" for r, e in zip(shown, ends, strict=True)]
        more = len(self.steps) - len(shown)
        lines += [f"  … {more} more steps"] if more else []
        return "\n".join([f"<Session of {self.block.name}", *lines]) + ">"

    def _repr_html_(self) -> str:
        """Return a table for notebooks, with a row per step."""
        names = ("step", "formula", "shape", "min", "max", "FLOPs")
        formulas = [r.formula if r.inputs else "" for r in self.steps]
        rows = [
            (r.name, formula, [*r.shape], r.min, r.max, f"{r.flops:,}")
            for r, formula in zip(self.steps, formulas, strict=True)
        ]
        return record_table(self.block.name, names, rows)


def session_of(question: Question, subject: TraceSubject, note: Note = lambda text: None) -> Session:
    """Answer the question. `note` is called with every remark as it arises: remarks on the model arise before the layer
    runs."""
    model, notes = subject.model, list[str]()

    def remark(*texts: str) -> None:
        for text in texts:
            notes.append(spelled(text))
            note(text)

    if subject.prompt:
        from ffncli.run.pretrained.capture import capture
        from ffncli.run.pretrained.loading import loading_notes

        remark(*loading_notes(model, subject.layer.index, question.dtype))
        prepared = capture(model, subject.prompt, subject.layer, question.dtype, question.device)
    else:
        prepared = prepare(
            model, subject.layer, input=question.input, leading=question.leading, dtype=question.dtype,
            device=question.device, seed=question.seed, train=question.train, vocab=question.vocab,
            integers=question.integers,
        )  # fmt: skip
    remark(*model.notes, *map(str, model.differences), *prepared.notes)
    gradient_places, subject = _gradient_places(question, subject, prepared)
    keep = _needed_tensors(question, subject, prepared)
    mask_state = prepared.mode.generator.get_state() if prepared.mode.train and prepared.mode.generator else None
    ran = (prepared.steps, prepared.weights, prepared.inputs, prepared.mode)
    result = trace(*ran, question.values_shown, subject.experts, keep, question.top_units or 0)
    remark(*_remarks(question, subject, result))
    not_finite = find_not_finite(result, prepared.weights)
    block = block_summary(model, prepared, question.device)
    step = _training_step(question, subject, prepared, mask_state) if question.backward else None
    if step is not None:
        remark(*step.notes)
    if question.save is not None:
        remark(_save(question, subject, block, prepared, result, step))
    probs = result.tensors.get("probs")
    return Session(
        question, model, prepared, block, result, not_finite,
        model_run=_model_run(subject, prepared, result),
        routes=chosen_experts(prepared.steps, result.tensors, question.values_shown),
        routing=routing_of(prepared.steps, result.tensors),
        **_tokens(question, subject, prepared, result, step),
        sampling=None if probs is None else sampling(probs, *question.sets, question.values_shown),
        flow=flow(prepared.steps, model.example.aliases if model.example else {}),
        **_text(question, subject, prepared),
        explain=_explain(question, subject, prepared, result, step, gradient_places),
        **_what_if(question, subject, prepared),
        patch=_patch(question, subject, prepared),
        over_ranks=_over_ranks(question, prepared, result),
        training_step=step,
        subject=subject,
        mask_state=mask_state,
        notes=tuple(notes),
    )  # fmt: skip


def _needed_tensors(question: Question, subject: TraceSubject, prepared: Prepared) -> frozenset[str]:
    """Return the printed names of the steps whose complete tensors the answer needs; all other tensors are freed."""
    steps = prepared.steps
    names = {"probs", *routes(steps), *(logits for _, logits in routers(steps).values())}
    if question.unembed or prepared.reference is not None:
        names |= {ffn_sum(steps), ffn_span(steps)[1]}
    if question.ranks is not None:
        from ffncli.run.ranks.one_process import compared_steps

        names |= compared_steps(steps, question.ranks)
    if subject.places:
        names |= _with_origins("explain", steps, [name for name, _ in subject.places], question.depth or 1)
    names |= {change.step for change in subject.changes if isinstance(change, NoUnit)}
    if question.keep and question.keep is not True:
        names |= _with_origins("keep", steps, sorted(question.keep), 0)
    if question.keep is True or question.save is not None:
        from ffncli.run.saved.saved import kept_for_saving

        names |= kept_for_saving(steps, prepared.inputs, subject.experts)
    return frozenset(names)


def _with_origins(field: str, steps: Sequence[Step], names: Sequence[str], depth: int) -> frozenset[str]:
    """Return the steps `names` and the steps that they were computed from, up to `depth` steps back."""
    from ffncli.run.explain.scene import find, needed

    try:
        return needed(steps, [find(steps, name).name for name in names], depth)
    except FFNError as error:
        raise error.within(option(field)) from None


# --- after the run ----------------------------------------------------------------------------------------------------


def _remarks(question: Question, subject: TraceSubject, result: Trace) -> list[str]:
    """Return notes on unchecked facts, removed units that are 0, and requested experts that receive no tokens."""
    out = []
    if subject.model.example and subject.model.example.dropped and question.train is False:
        out.append("dropout is off, but the example's statements need it: they are not checked")
    names = [record.name for record in result.steps]
    idle = [e for e in sorted(subject.experts or ()) if not any(name.startswith(f"experts.{e}.") for name in names)]
    removed = [change for change in subject.changes if isinstance(change, NoUnit)]
    zero = [change.unit for change in removed if not result.tensors[change.step][..., change.unit].any()]
    out += [f"unit {unit} is 0 for every token: without it, nothing changes" for unit in zero]
    return out + ([f"no token is routed to expert {', '.join(map(str, idle))}"] if idle else [])


def _save(
    question: Question, subject: TraceSubject, block: BlockSummary, prepared: Prepared, result: Trace,
    step: TrainingStep | None,
) -> str:  # fmt: skip
    """Save the trace with a description of its block; return a note on the saved file."""
    from ffncli.run.saved.saved import SMALL_WEIGHTS, SavedGradient, save

    if question.save_path.suffix in TABLES:
        count = save_values(question.save_path, result.steps, result.tensors, prepared.tokens, prepared.layer.index)
        return f"saved {count:,} values of {len(result.steps)} steps to {question.save}"
    size = sum(tensor.numel() * tensor.element_size() for tensor in prepared.weights.values())
    with_weights = size <= SMALL_WEIGHTS if question.save_weights is None else question.save_weights
    seed = prepared.mode.generator.initial_seed() if prepared.mode.generator else None
    about = {**asdict(block), "seed": seed, "dtype": result.steps[0].dtype}
    weights, prompt = prepared.weights if with_weights else {}, subject.prompt.text if subject.prompt else None
    gradients = (
        []
        if step is None
        else [
            (SavedGradient(one.name, one.symbol, one.formula, one.shape, one.dtype), step[one.name])
            for one in step.gradients
        ]
    )
    save(question.save_path, prepared.steps, result, about, weights, prompt, prepared.tokens, gradients)
    left = f" and {len(gradients)} gradients" if gradients else ""
    left = f"{left} to {question.save}" + ("" if with_weights else ", without weights")
    if not with_weights and question.save_weights is None:
        left += f" ({size / 1e6:,.0f} MB; {option('save_weights')} adds them)"
    return f"saved {len(result.steps)} tensors{left}"


def _model_run(subject: TraceSubject, prepared: Prepared, result: Trace) -> ModelRun | None:
    if prepared.reference is None or subject.prompt is None:
        return None
    return ModelRun(
        subject.prompt.text, prepared.tokens, agreement(result.tensors[result.ffn_output], prepared.reference)
    )


def _over_ranks(question: Question, prepared: Prepared, result: Trace) -> RankTrace | None:
    """Run the same block over ranks; None if no split was requested, or on ranks other than 0."""
    if question.ranks is None:
        return None
    from ffncli.run.ranks.one_process import rank_trace

    block, events = (prepared.steps, prepared.weights, prepared.inputs, question.ranks), None
    if torchrun() is not None:
        from ffncli.run.ranks.parallel import gathered_events

        events = gathered_events(*block, question.device)
        if follows():
            return None
    return rank_trace(*block, result.tensors, question.values_shown, events)


def _text(question: Question, subject: TraceSubject, prepared: Prepared) -> dict[str, Any]:
    """Return an example's steps by the names in its source, and its computed facts; otherwise an empty mapping."""
    name, example = question.example, subject.model.example
    if name is None or example is None or (example.dropped and question.train is False):
        return {}
    from ffncli.run.texts import facts

    return {"aliases": dict(example.aliases), "facts": facts(name, prepared)}


def _tokens(
    question: Question, subject: TraceSubject, prepared: Prepared, result: Trace, step: TrainingStep | None
) -> dict[str, Any]:
    """Return, if requested, the tokens that the output (of a training step: the change of the output) promotes, and the
    units that promote a token."""
    if not question.unembed and question.promotes is None:
        return {}
    from ffncli.run.trace.unembed import promoting, unembedded

    if step is not None and step.lr is not None:
        output = ffn_sum(prepared.steps)
        new = forward(prepared.steps, step.weights, prepared.inputs).tensors[output]
        result = replace(result, tensors={**result.tensors, output: new - result.tensors[output]})
        prepared = replace(prepared, stream=None)  # the change does not belong to this pass
    return {
        "unembed": unembedded(question, subject, prepared, result) if question.unembed else None,
        "promotes": promoting(question, subject, prepared),
    }


def _gradient_places(
    question: Question, subject: TraceSubject, prepared: Prepared
) -> tuple[list[StepIndex], TraceSubject]:
    """Return (the requested elements of gradients, the subject with the other elements)."""
    if not question.backward or not subject.places:
        return [], subject
    from ffncli.run.explain.gradients import gradient_name

    named = [(gradient_name(prepared.steps, name), index) for name, index in subject.places]
    others = tuple(place for place, (name, _) in zip(subject.places, named, strict=True) if name is None)
    return [(name, index) for name, index in named if name is not None], replace(subject, places=others)


def _training_step(
    question: Question, subject: TraceSubject, prepared: Prepared, mask_state: Tensor | None
) -> TrainingStep:
    """Go back through the block, from a loss of its output or, if a model ran on a prompt, of its next tokens."""
    from ffncli.run.trace.training_step import model_step, training_step

    if subject.prompt is not None:
        return model_step(
            subject.model, subject.prompt, prepared, question, question.values_shown, subject.experts, question.dtype,
            question.device,
        )  # fmt: skip
    return training_step(subject.model, prepared, question, question.values_shown, subject.experts, mask_state)


def _explain(
    question: Question, subject: TraceSubject, prepared: Prepared, result: Trace, step: TrainingStep | None,
    gradients: Sequence[StepIndex],
) -> Explained:  # fmt: skip
    """Explain how each requested value was computed: first values of steps, then values of gradients."""
    if not (subject.places or gradients):
        return Explained()
    from ffncli.run.explain.explain import explain
    from ffncli.run.explain.scene import Scene

    scene = Scene(prepared.steps, prepared.weights, result.tensors, prepared.mode)
    terms, depth, asked = question.terms or TERMS, question.depth or 1, option("explain")
    values = [one for name, index in subject.places for one in explain(scene, name, index, terms, depth, asked)]
    if step is not None and step.ran is not None and gradients:
        from ffncli.run.explain.gradients import GradientScene, explain_gradient

        backward = GradientScene(prepared.steps, step.ran, step.tensors)
        for name, index in gradients:
            values += explain_gradient(backward, name, index, terms, depth, asked)
    return Explained(values)


def _what_if(question: Question, subject: TraceSubject, prepared: Prepared) -> dict[str, Any]:
    """Compare the steps with the steps of the changed block and, if there is a prompt, the model's predictions."""
    if not (subject.changes or subject.elsewhere):
        return {}
    from ffncli.run.pretrained.what_if import step_changes

    changes = step_changes(prepared.steps, prepared.weights, prepared.inputs, subject.changes)
    prediction = None
    if subject.prompt is not None:
        from ffncli.run.pretrained.what_if import prediction_change

        top = question.top_tokens or TOP_TOKENS
        prediction = prediction_change(
            subject.model,
            subject.layer,
            subject.prompt,
            {subject.layer: subject.changes, **subject.elsewhere},
            top,
            question.dtype,
            question.device,
        )
    return {"changes": changes, "prediction": prediction}


def _patch(question: Question, subject: TraceSubject, prepared: Prepared) -> Patch | None:
    """Return what values of another prompt's run change; None if not requested."""
    if question.patch_from is None or subject.prompt is None:
        return None
    from ffncli.run.pretrained.patch import patch
    from ffncli.run.pretrained.prompt import Prompt

    other, written = Prompt(question.patch_from, name="patch_from"), ffn_span(prepared.steps)[1]
    step = question.patch or next((one.inputs[0] for one in prepared.steps if one.output == "down"), written)
    return patch(subject.model, subject.layer, subject.prompt, other, step, question.dtype, question.device)


_MOST_VALUES = 20_000_000  # values of a table


@package_errors()
def step_frame(tensor: Tensor, rows: Sequence[int] | None, tokens: Sequence[Token], layer: int) -> DataFrame:
    """Return `layer`, `token`, `unit` and `value` of a step's tensor [..., units].

    `rows` are the tokens routed to an expert, one per row of the expert's tensor. `tokens` are the tokens of a prompt;
    if there are any, the column `token` contains their positions.
    """
    import pandas

    flat = tensor.detach().reshape(-1, tensor.shape[-1]).cpu()
    flat = flat.float() if flat.dtype == torch.bfloat16 else flat  # NumPy has no bfloat16
    numbers = range(flat.shape[0]) if rows is None else rows
    positions = torch.tensor([tokens[row].position if tokens else row for row in numbers], dtype=torch.int64)
    return pandas.DataFrame(
        {
            "layer": layer,
            "token": positions.repeat_interleave(flat.shape[1]).numpy(),
            "unit": torch.arange(flat.shape[1]).repeat(flat.shape[0]).numpy(),
            "value": flat.flatten().numpy(),
        }
    )


@package_errors()
def save_values(
    path: Path, records: Sequence[StepRecord], tensors: Mapping[str, Tensor], tokens: Sequence[Token], layer: int
) -> int:
    """Write the values of all steps as one table, with `step` before the columns of `step_frame`, to a .csv or .parquet
    file.

    Return the number of values; raise FFNError if there are too many for a table.
    """
    import pandas

    count = sum(tensors[record.name].numel() for record in records)
    if count > _MOST_VALUES:
        what = f"{option('save')}: {count:,} values are too many for a table (the limit is {_MOST_VALUES:,})"
        raise FFNError(what, f"save as .safetensors, or give fewer tokens by {option('position')}")
    frames = [step_frame(tensors[record.name], record.tokens, tokens, layer) for record in records]
    named = [frame.assign(step=record.name) for frame, record in zip(frames, records, strict=True)]
    save_table(pandas.concat(named, ignore_index=True)[["step", *frames[0].columns]], path)
    return count
