"""The options of a trace, the rules between them, and a question's subject. Does not import torch."""

import csv
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import nan
from pathlib import Path
from typing import Annotated, Any

from ffncli.block import dtypes
from ffncli.block.shard import Ranks
from ffncli.block.steps import ffn_steps
from ffncli.errors import FFNError, option, shown, shown_path
from ffncli.models.counting.count import storage_of
from ffncli.models.dimensions import Dimensions, leading_axes, whole
from ffncli.models.examples import EXAMPLES, demo, final_layer_alone, find
from ffncli.models.model import Group, Layer, Resolved, folder_of
from ffncli.options import conflicts, shared
from ffncli.options.accept import COUNT, NATURAL, NUMBERS, SHARE, TEXT, Accepts, optional, outside_brackets, several
from ffncli.options.accept import whole as whole_from
from ffncli.options.conflicts import Conflict
from ffncli.options.opt import COMPUTE, OUTPUT, SOURCE, Opt
from ffncli.run.corpus.question import TABLES
from ffncli.run.engine.changes import Change, changes_of, function_edit
from ffncli.run.explain.place import StepIndex, place_of
from ffncli.run.pretrained.prompt import DIMENSIONS, PROMPT_RULES, Prompt, prompt_of
from ffncli.run.trace.step_question import STEP_RULES, Backward, StepOptions
from ffncli.run.user.load import load
from ffncli.run.user.options import Input, ModelSource
from ffncli.system.files import TENSOR_SUFFIXES, check_writable, read_whole
from ffncli.system.packages import require_extra

TOP_K, TOP_P = 5, 0.9
TERMS = 8
TOP_TOKENS = 10
_MOST_PLACES = 100  # places in one question
Texts = str | Sequence[str] | None

# --- the options ----------------------------------------------------------------------------------------------------

_view = partial(Opt, group=shared.VIEW)
_explain = partial(Opt, group="How a number was computed")
_what_if = partial(Opt, group="What if", repeat=True)
_final = partial(Opt, group="Final layer")
_unembed = partial(Opt, group="Tokens that the output promotes")


def _edits(value: Any) -> dict[str, Callable[[Any], Any]]:
    edits = {str(name): function for name, function in value.items()}
    if not all(map(callable, edits.values())):
        raise TypeError
    return edits


EDITS = Accepts("a mapping from steps to functions, such as {'act': lambda act: 2 * act}", _edits)


def _name(value: Any) -> str:
    return TEXT.convert(value).strip().lower()


def _kept(value: Any) -> bool | tuple[str, ...]:
    """Return True to keep all steps, or the names of the steps to keep."""
    if isinstance(value, bool):
        return value or ()
    return several(TEXT, "", least=0).convert(value)


@dataclass(frozen=True, kw_only=True)
class Question(Dimensions, StepOptions):
    """Run one layer's FFN step by step, as `ffn trace` does, and return all results of the run.

    >>> import ffncli
    >>> session = ffncli.trace("512x2048:gelu", tokens=2, explain="up[0,3]")
    >>> session["act"].shape, session.step("act").formula, session.explain[0].place
    (torch.Size([2, 2048]), 'gelu(up)', 'up[0,3]')
    >>> session.frame("act").columns.tolist()
    ['layer', 'token', 'unit', 'value']

    `source` is any SOURCE (a directory, a model's name, `512x2048:gelu`, `my.py:Class`), a path, a model returned by
    `load`, or an nn.Module: a transformers model, a layer of such a model, or a module to be identified like
    `my.py:Class`. None means a demo block. `input` contains values [tokens, d_model], [d_model] or [batch, tokens,
    d_model] (list, NumPy array or tensor), or is a string as on the command line. The other arguments have the names of
    the command line's options (`ffn trace --help`) and also accept numbers and lists: `layer=1`, `position=[0, 3]`,
    `show=None` (all values), `d_ff="4x"`. `keep` lists the steps whose tensors are kept (True: all steps); `threads`
    sets the thread count of the whole process. Raises FFNError for everything that the command line rejects.
    """

    source: ModelSource = field(default=None, kw_only=False)
    input: Input = field(default=None, kw_only=False)
    layer: shared.LayerOrAll = None
    example: Annotated[
        str | None,
        Opt(
            "--example", metavar="NAME", accepts=Accepts("a string", _name),
            group=SOURCE, daily=True, completes="examples",
            help=f"Built-in block with checked facts: {', '.join(EXAMPLES)}.",
        ),
    ] = None  # fmt: skip
    tokens: shared.Tokens = None
    batch: shared.Batch = None
    seq_len: shared.SeqLen = None
    prompt: shared.Prompt = None
    input_ids: shared.InputIds = None
    position: shared.Position = None
    expert: Annotated[
        shared.Numbers | None,
        _view("--expert", metavar="N,...|all", accepts=NUMBERS, help="Show the steps inside these experts."),
    ] = None
    show: Annotated[
        int | str | None,
        _view(
            "--show", accepts=optional(COUNT, "a whole number from 1, or all", "all"),
            daily=True, help="Values to show per axis.",
        ),
    ] = 8  # fmt: skip
    keep: Annotated[
        bool | str | Sequence[str],
        _view(
            "--keep", accepts=Accepts("names of steps, or True for all", _kept), flag=True,
            help="Keep every intermediate tensor in memory until the end.",
        ),
    ] = ()  # fmt: skip
    top_units: shared.TopUnits = None
    explain: Annotated[
        Texts,
        _explain(
            "--explain", metavar="NAME[i,j]", accepts=several(TEXT, "elements such as ['up[0,3]']", least=0),
            daily=True, help="Show how this number was computed; repeatable.",
        ),
    ] = ()  # fmt: skip
    terms: Annotated[
        int | None, _explain("--terms", accepts=COUNT, help=f"Terms to show, largest first. [default: {TERMS}]")
    ] = None
    depth: Annotated[
        int | None,
        _explain("--depth", accepts=whole_from(1, 99), help="Follow the largest term back N steps. [default: 1]"),
    ] = None
    set: Annotated[
        Texts,
        _what_if(
            "--set", metavar="TENSOR[i,j]=VALUE",
            accepts=several(TEXT, "weights or steps and their values, such as ['W1[0,3]=5', 'act[:,3]*=2']", least=0),
            help="Set a weight (W1[0,3]=5) or values of a step (act[:,3]=2, hidden[2,:]*=0.5), and show what changes; "
            "L4.act[:,3]=2 in layer 4; repeatable.",
        ),
    ] = ()  # fmt: skip
    ablate: Annotated[
        Texts,
        _what_if(
            "--ablate", metavar="PART",
            accepts=several(TEXT, "parts such as ['unit:3', 'expert:5', 'gate']", least=0),
            help="Remove unit:358, unit:7:3 (in expert 7), expert:5 or gate (act := 1), and show what changes; "
            "L3.unit:5,L4.unit:7 in several layers.",
        ),
    ] = ()  # fmt: skip
    ablate_with: Annotated[
        str,
        Opt(
            "--ablate-with", metavar="VALUE", accepts=TEXT, group="What if",
            help="Value of a removed unit: zero, or mean:FILE.csv, its mean in a file of ffn trace --prompts --save.",
        ),
    ] = "zero"  # fmt: skip
    edit: Annotated[Mapping[str, Callable[[Any], Any]] | None, EDITS] = None
    patch_from: Annotated[
        str | None,
        Opt(
            "--patch-from", metavar="PROMPT", accepts=TEXT, group="What if",
            help="Put a step's values from a run on PROMPT into the run on that of -p: what moves the prediction.",
        ),
    ] = None  # fmt: skip
    patch: Annotated[
        str | None,
        Opt("--patch", metavar="STEP", accepts=TEXT, group="What if",
            help="With --patch-from: the step. [default: what the down projection reads, or a mixture's output]"),
    ] = None  # fmt: skip
    tp: shared.TensorParallel = None
    ep: shared.ExpertParallel = None
    vocab: Annotated[
        int | None, _final("--vocab", accepts=COUNT, help="Add a final layer over N tokens: logits and probabilities.")
    ] = None
    sample_top_k: Annotated[
        int | None, _final("--sample-top-k", accepts=COUNT, help=f"Mark the N most probable tokens. [default: {TOP_K}]")
    ] = None
    sample_top_p: Annotated[
        float | None,
        _final(
            "--sample-top-p", accepts=SHARE,
            help=f"Mark the most probable tokens up to a total of P. [default: {TOP_P}]",
        ),
    ] = None  # fmt: skip
    unembed: Annotated[
        bool, _unembed("--unembed", daily=True, help="Show the tokens that the FFN's output promotes.")
    ] = False
    neuron: Annotated[
        int | None,
        _unembed(
            "--neuron",
            accepts=NATURAL,
            help="With --unembed: the tokens that hidden unit N promotes; with --prompts: all about it.",
        ),
    ] = None
    top_tokens: Annotated[
        int | None,
        _unembed("--top-tokens", accepts=COUNT, help="With --unembed: how many tokens to show. [default: 10]"),
    ] = None
    promotes: Annotated[
        str | None,
        _unembed(
            "--promotes", metavar="TOKEN", help="Show the units that raise this token's logit, and those that lower it."
        ),
    ] = None
    device: shared.Device = "cpu"
    seed: shared.Seed = None
    integers: Annotated[
        bool,
        Opt("--integers", group=COMPUTE, help="Draw weights and input from -3 to 3, for sums in one's head."),
    ] = False  # fmt: skip
    threads: shared.Threads = None
    dtype: shared.Dtype = None
    train: Annotated[bool | None, Opt("--train/--eval", group=COMPUTE, help="Apply dropout, or turn it off.")] = None
    save: shared.Save = None
    save_weights: Annotated[
        bool | None,
        Opt(
            "--save-weights/--no-save-weights",
            group=OUTPUT,
            help="Save the weights too. [default: if 64 MB or less]",
        ),
    ] = None
    force: shared.Force = False

    @property
    def ranks(self) -> Ranks | None:
        """The ranks over which the block also runs; None if no split was requested."""
        return Ranks(self.tp or 1, self.ep or 1) if self.tp or self.ep else None

    @property
    def leading(self) -> tuple[int, ...] | None:
        """The input's axes before d_model, None by default; raises FFNError if they are given twice."""
        return leading_axes(self.tokens, self.batch, self.seq_len)

    @property
    def values_shown(self) -> int | None:
        """The number of values shown per axis; None for all."""
        return None if self.show is None else int(self.show)

    @property
    def sets(self) -> tuple[int, float]:
        """The K and P of the top-k and top-p sets to mark."""
        return self.sample_top_k or TOP_K, self.sample_top_p or TOP_P

    @property
    def save_path(self) -> Path:
        """The file to save to, with `~` expanded."""
        return Path(os.path.expanduser(self.save or ""))

    def check_top_k(self, vocab: int) -> None:
        """Raise FFNError if `sample_top_k` exceeds the vocabulary size."""
        if self.sample_top_k is not None and self.sample_top_k > vocab:
            raise FFNError(f"{option('sample_top_k', self.sample_top_k)} exceeds the vocabulary of {vocab}")


@dataclass(frozen=True, kw_only=True)
class SurveyQuestion(Dimensions):
    """Trace every layer that has an FFN, as `ffn trace --layer all` does; `rows` contains a record per layer.

    >>> import ffncli
    >>> [row.layer for row in ffncli.survey("llama-2-7b", d_model=8, d_ff=16, tokens=2).rows][-1]
    31

    The arguments mean the same as in `trace`; FFNError is raised for the same reasons.
    """

    source: ModelSource = field(default=None, kw_only=False)
    prompt: shared.Prompt = None
    input_ids: shared.InputIds = None
    position: shared.Position = None
    tokens: shared.Tokens = None
    batch: shared.Batch = None
    seq_len: shared.SeqLen = None
    input: Input = None
    dtype: shared.Dtype = None
    device: shared.Device = "cpu"
    seed: shared.Seed = None
    threads: shared.Threads = None
    top_units: shared.TopUnits = None
    backward: Backward = False

    @property
    def leading(self) -> tuple[int, ...] | None:
        """The input's axes before d_model, None by default; raises FFNError if they are given twice."""
        return leading_axes(self.tokens, self.batch, self.seq_len)


# --- options that contradict or need each other ----------------------------------------------------------------------

_PROMPT = "prompt input_ids"
RULES = (
    *PROMPT_RULES,
    *STEP_RULES,
    Conflict("train=True", contradicts=_PROMPT, why="the model is run in eval mode"),
    Conflict("vocab", contradicts=_PROMPT, why=f"{option('unembed')} uses the model's own head"),
    Conflict("integers", contradicts=f"{_PROMPT} example", why="it draws the weights"),
    Conflict("position", needs=f"{_PROMPT} unembed"),
    Conflict("neuron", needs="unembed"),
    Conflict("top_tokens", needs="unembed set ablate edit"),
    Conflict("top_tokens", needs=_PROMPT, unless="unembed", why="without a prompt there is no prediction to change"),
    Conflict("terms depth", needs="explain"),
    Conflict("save_weights", needs="save"),
    Conflict("sample_top_k sample_top_p", needs="vocab unembed example=conv", why="probabilities need logits"),
    Conflict("train=True", contradicts="set ablate edit", why="dropout would change the values too"),
    Conflict("ablate_with", needs="ablate"),
    Conflict("patch", needs="patch_from"),
    Conflict("patch_from", needs="prompt", why="it runs the whole model on both texts"),
    Conflict("train=True", contradicts="tp ep", why="ranks run in eval mode"),
    Conflict("example", contradicts="source", why="give one or the other"),
    Conflict(
        "example", contradicts=DIMENSIONS, why="the example is a fixed block, and its facts hold only for that block"
    ),
    Conflict("example", contradicts="input", why="the example's facts hold for its own input, or a random input"),
    Conflict("example!=conv", contradicts="vocab", why="only conv has a final layer"),
    Conflict(
        "example=notebook",
        contradicts="tokens batch seq_len seed train=True",
        why="the example specifies its input and its mask",
    ),
)
ONE_LAYER = (
    Conflict(
        "unembed promotes train explain save vocab expert tp ep set ablate integers",
        contradicts="layer=all",
        why="the option concerns one layer: give the layer's number",
    ),
)

SURVEY_RULES = (
    Conflict("backward", needs=_PROMPT, why="without a model's loss, layers have no gradients"),
    Conflict("backward", contradicts="position", why="a gradient is a sum over all tokens"),
)

# --- the subject of a question
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TraceSubject:
    """The subject of a question: the model, its `layer`, and the `prompt` that the model reads, if any.

    `experts` are the experts whose steps are shown (None: all); `places` are the elements to explain, with ffncli's
    step names; `changes` are the changes of the block to try, `elsewhere` those of other layers.
    """

    model: Resolved
    layer: Layer
    prompt: Prompt | None = None
    experts: frozenset[int] | None = frozenset()
    places: tuple[StepIndex, ...] = ()
    changes: tuple[Change, ...] = ()
    elsewhere: Mapping[Layer, tuple[Change, ...]] = field(default_factory=dict)


def subject_of(question: Question) -> TraceSubject:
    """Determine the subject of a question about one layer; raise FFNError if the question cannot be answered."""
    conflicts.check(RULES, question, {"edit": question.edit})
    prompt = prompt_of(question.prompt, question.input_ids, question.position)
    model = _model(question)
    layer = model.model.layer(question.layer)
    experts = frozenset() if question.expert is None else _experts(str(question.expert), model, layer)
    _ = question.leading
    places = _places(question, model.example.aliases if model.example else {})
    _check_save(question)
    if prompt:
        folder_of(model, prompt.option)
    _check_head(question, model, layer, experts)
    if question.ranks is not None:
        _check_ranks(question, question.ranks, model, layer)
    changes = _changes(question, model, layer) if question.set or question.ablate or question.edit else {}
    here = changes.pop(layer, ())
    return TraceSubject(model, layer, prompt, experts, places, here, changes)


def model_of(question: SurveyQuestion) -> tuple[Resolved, Prompt | None]:
    """Return the model of a question about all layers, and the prompt, if any, that the model reads.

    An example is surveyed without its own input, weights and mask, because every layer gets the same input.
    """
    conflicts.check((*PROMPT_RULES, Conflict("position", needs=_PROMPT), *SURVEY_RULES), question)
    prompt = prompt_of(question.prompt, question.input_ids, question.position)
    _ = question.leading
    if question.source is None and question.d_model is None:
        return replace(demo(question.dimensions), example=None), prompt
    model = replace(load(question.source, question.dimensions, question.seed or 0), example=None)
    if prompt:
        folder_of(model, prompt.option)
    return model, prompt


# --- the block ------------------------------------------------------------------------------------------------------


def _model(question: Question) -> Resolved:
    """Return the model of a question: an example, a final layer alone, the demo, or the model of SOURCE."""
    chosen = question.dimensions
    block = replace(chosen, d_model=None, bias=None)  # the dimensions that need a block before the final layer
    if question.example is not None:
        model = find(question.example)
        if question.dtype is not None and dtypes.dtype(question.dtype).name not in ("fp32", "fp64"):
            what = f"{option('example')} contradicts {option('dtype', question.dtype)}"
            raise FFNError(what, "its facts are about exact numbers: use fp32 or fp64")
    elif question.source is None and question.vocab and chosen.d_model is not None and not block.any_set():
        d_model = whole(option("d_model"), chosen.d_model)
        model = final_layer_alone(d_model, question.vocab, chosen.bias is not False)
    elif question.source is None and chosen.d_model is None:
        model = demo(chosen)
    else:
        model = load(question.source, chosen, question.seed or 0)
    # The vocabulary size of a checkpoint is not known yet.
    if vocab := question.vocab or (model.example.vocab if model.example else 0):
        question.check_top_k(vocab)
    return model


# --- checks that depend on the layer
# ----------------------------------------------------------------------------------------


def _experts(text: str, model: Resolved, layer: Layer) -> frozenset[int] | None:
    """Return the indices of the experts to show, parsed from a list such as `0,3`; None for `all`."""
    moe, name = layer.spec.moe, model.model.name
    if moe is None:
        first = next((g.layers[0] for g in model.model.groups if g.spec.moe), None)
        advice = "it is dense" if first is None else f"the first MoE layer is {first}"
        raise FFNError(f"{option('expert', text)}: this layer of {name} has no experts", advice)
    if text == "all":
        return None
    if not re.fullmatch(r" *[0-9]{1,9} *(, *[0-9]{1,9} *)*", text):
        raise FFNError(f"{option('expert')} must be an expert's index, a list such as 0,3, or all, got {shown(text)}")
    experts = frozenset(int(word) for word in text.split(","))
    if max(experts) >= moe.experts:
        raise FFNError(
            f"{option('expert', max(experts))} is out of range", f"{name} has experts 0 to {moe.experts - 1}"
        )
    return experts


def _check_head(question: Question, model: Resolved, layer: Layer, experts: frozenset[int] | None) -> None:
    """Raise FFNError, before anything large is loaded, if no head reads the layer or the unit does not exist."""
    name = "unembed" if question.unembed else "promotes" if question.promotes is not None else None
    if name is None:
        return
    folder_of(model, option(name))
    if layer.stack == "encoder" and any(group.stack == "decoder" for group in model.model.groups):
        what = f"{option(name)}: no head reads {model.model.name}'s encoder"
        raise FFNError(what, "a decoder layer's output can be unembedded")
    if question.neuron is None:
        return
    neuron = option("neuron", question.neuron)
    if question.neuron >= layer.spec.d_ff:
        raise FFNError(f"{neuron} is out of range", f"d_ff is {layer.spec.d_ff}: 0 to {layer.spec.d_ff - 1}")
    if layer.spec.moe and not experts:
        raise FFNError(
            f"{neuron}: each of {layer.spec.moe.experts} experts has this unit", f"add {option('expert', 0)}"
        )


def _check_ranks(question: Question, ranks: Ranks, model: Resolved, layer: Layer) -> None:
    """Raise FFNError if the layer cannot be split over the ranks; the hint names the nearest rank counts that work."""
    from ffncli.models.counting.parallel import check_ranks

    if model.example and model.example.dropped and question.train is None:
        what = f"{option('example', question.example)} contradicts {option('tp' if question.tp else 'ep')}"
        raise FFNError(what, "its dropout is on, but ranks run in eval mode")
    alone = replace(model.model, groups=(Group(layer.stack, (layer.index,), layer.spec),))
    # Only a file can have block-quantized weights; random weights are plain floats.
    weights = storage_of(model) if model.checkpoint else dtypes.dtype("fp32")
    check_ranks(alone, ranks, weights)


_LAYER = re.compile(r"\s*L(?:(\w+)\.)?([0-9]{1,9})\.(.*)", re.S)  # L3.unit:5, Ldecoder.3.act[:,3]=2


def _changes(question: Question, model: Resolved, layer: Layer) -> dict[Layer, tuple[Change, ...]]:
    """Return the changes of each layer's block; raise FFNError in training mode."""
    if model.example and model.example.dropped and question.train is None:
        asked = next(name for name in ("set", "ablate", "edit") if getattr(question, name))
        what = f"{option('example', question.example)} contradicts {option(asked)}"
        raise FFNError(what, f"add {option('train', False)}: dropout would change the values too")
    prompted = question.prompt is not None or question.input_ids is not None
    wanted: dict[Layer, tuple[list[str], list[str]]] = {layer: ([], [])}
    texts = [(0, one) for several in question.set or () for one in outside_brackets(several)]
    texts += [(1, one) for several in question.ablate or () for one in several.split(",")]
    for kind, text in texts:
        where, rest = layer, text
        if match := _LAYER.fullmatch(text):
            try:
                where, rest = model.model.layer(f"{match[1]}.{match[2]}" if match[1] else int(match[2])), match[3]
            except FFNError as error:
                raise FFNError(f"{option(('set', 'ablate')[kind], text)} is in no layer", error.hint) from None
        wanted.setdefault(where, ([], []))[kind].append(rest)
    if len(wanted) > 1 and not prompted:
        raise FFNError("changes in several layers need a text that runs through them", f"add {option('prompt')}")
    out: dict[Layer, tuple[Change, ...]] = {}
    for where, (sets, ablations) in wanted.items():
        block = ffn_steps(model.block(where)) if prompted else model.block(where)
        means = None if question.ablate_with == "zero" else unit_means(question.ablate_with, where)
        edits = [function_edit(block, *item) for item in (question.edit or {}).items()] if where is layer else []
        out[where] = (*changes_of(block, sets, ablations, means), *edits)
    return out


def unit_means(text: str, layer: Layer) -> Callable[[int | None, int], float]:
    """Return a function from (expert, unit) to the unit's mean over a corpus, in a table that `ffn trace --prompts
    --save` wrote. Raises FFNError for other files, and if the table lacks the unit."""
    kind, _, name = text.partition(":")
    asked = option("ablate_with", text)
    if kind != "mean" or not name:
        raise FFNError(f"{asked} is not a value", "give zero, or mean:FILE.csv of ffn trace --prompts --save FILE.csv")
    path = Path(os.path.expanduser(name))
    try:
        lines = read_whole(path, _MOST_TABLE).decode("utf-8", "replace").splitlines()
    except OSError as error:
        raise FFNError(f"{asked}: cannot read {shown_path(path)}: {error.strerror or error}") from None
    means: dict[tuple[str, str], float] = {}
    for row in csv.DictReader(lines):
        if (row.get("stack"), row.get("layer")) == (layer.stack, str(layer.index)) and row.get("part") != "shared":
            try:
                means[row.get("expert") or "", row.get("unit") or ""] = float(row.get("mean") or nan)
            except ValueError:
                raise FFNError(f"{asked}: {shown(row.get('mean'))} is not a mean") from None

    def mean(expert: int | None, unit: int) -> float:
        value = means.get(("" if expert is None else str(expert), str(unit)), nan)
        if value != value:
            raise FFNError(f"{asked}: {shown_path(path)} has no mean of unit {unit} of layer {layer.index}")
        return value

    return mean


_MOST_TABLE = 1 << 30


# --- the elements to explain -------------------------------------------------------------------------------------


def _places(question: Question, aliases: Mapping[str, str]) -> tuple[StepIndex, ...]:
    """Return (name, index) of every element to explain; `aliases` maps names in an example's source to ffncli's."""
    ours = {theirs: name for name, theirs in aliases.items()}
    texts = [re.sub(r"\b\w++(?=[\[:])", lambda m: ours.get(m[0], m[0]), text) for text in question.explain or ()]
    places = tuple(place_of(text) for several in texts for text in _split(several))
    if len(places) > _MOST_PLACES:
        raise FFNError(f"{option('explain')} accepts at most {_MOST_PLACES} elements, got {len(places)}")
    return places


def _split(text: str) -> list[str]:
    """Split `up[0,3],down[0,1]` at commas outside brackets; without brackets, `up:0,3` is one place."""
    return outside_brackets(text) if "[" in text else [text]


# --- the file to save to
# ------------------------------------------------------------------------------------------------


def _check_save(question: Question) -> None:
    """Raise FFNError if the file cannot be saved: an unknown suffix, an existing file, a missing directory."""
    if question.save is None:
        return
    suffix, save = question.save_path.suffix, option("save", question.save)
    if suffix not in (*TENSOR_SUFFIXES, *TABLES):
        raise FFNError(f"{save}: the name must end in one of {', '.join((*TENSOR_SUFFIXES, *TABLES))}")
    if suffix in TABLES and question.save_weights:
        what = f"{option('save_weights')}: a table of values ({suffix}) has no weights"
        raise FFNError(what, "save as .safetensors")
    if suffix in TABLES and question.backward:
        raise FFNError(f"{save}: a table of values ({suffix}) has no gradients", "save as .safetensors")
    if suffix == ".parquet":
        require_extra("pyarrow", "parquet")
    check_writable(str(question.save_path), question.force, option("save"))
