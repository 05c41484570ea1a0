"""Run texts in batches through a model, with hooks on every FFN."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ffncli.block import steps as ops
from ffncli.block.recipe import steps
from ffncli.block.steps import Step, ffn_span, ffn_steps, ffn_sum, id_inputs, parameters, routes, state_inputs, tables
from ffncli.block.value import unit_steps
from ffncli.errors import ExitCode, FFNError, shown
from ffncli.models.model import Layer
from ffncli.run.corpus.texts import Text
from ffncli.run.engine.execute import EVAL, Event, activation, execute
from ffncli.run.engine.locate import LiveFFN, live_weights
from ffncli.run.engine.trace import DENSE, UnitEvents, UnitGroup
from ffncli.run.pretrained.capture import batch_arguments, first_tensor
from ffncli.run.pretrained.loading import Pretrained, cannot, demanding

_WINDOW = 16  # batches whose texts are sorted together


@dataclass(frozen=True)
class Tokenized:
    """A text's token ids, and whether the text was `cut`."""

    number: int
    ids: tuple[int, ...]
    cut: bool


@dataclass(frozen=True)
class Batch:
    """Texts that run together: `ids` and `mask` [texts, length], padded on the right.

    `places` [tokens, 2] has the text's index and the position of every token that counts: that is neither padding nor
    left out. `rows` are the indices of these tokens among the batch's texts · length rows, None if all count; `lengths`
    are their numbers in each text.
    """

    ids: Tensor
    mask: Tensor
    places: Tensor
    rows: Tensor | None
    lengths: tuple[int, ...]
    numbers: tuple[int, ...]

    def tokens_of(self, tensor: Tensor) -> Tensor:
        """Return a tensor [texts, length, width] or [texts · length, width] as rows [tokens, width], without padding. A
        tensor with three axes may be padded beyond `length`."""
        texts, length = self.ids.shape
        if tensor.dim() == 3 and tensor.shape[0] == texts and tensor.shape[1] >= length:
            tensor = tensor[:, :length]
        flat = tensor.reshape(-1, tensor.shape[-1])
        if flat.shape[0] != texts * length:
            raise FFNError(f"{flat.shape[0]} rows enter an FFN for {texts} texts of {length} tokens")
        return flat if self.rows is None else flat.index_select(0, self.rows)


def batch_of(texts: Sequence[Tokenized], padding: int, device: str, left_out: Sequence[int] = ()) -> Batch:
    """Build one batch of these texts, in the order of their numbers and padded with the token `padding`; the tokens
    `left_out` do not count."""
    texts = sorted(texts, key=lambda text: text.number)
    lengths = tuple(len(text.ids) for text in texts)
    longest = max(lengths)
    ids = torch.tensor([[*text.ids, *[padding] * (longest - len(text.ids))] for text in texts], device=device)
    count = torch.tensor(lengths)
    mask = torch.arange(longest) < count[:, None]
    counts = mask & ~torch.isin(ids.cpu(), torch.tensor([*left_out], dtype=torch.int64)) if left_out else mask
    numbers = torch.tensor([text.number for text in texts])
    places = torch.stack([numbers[:, None].expand_as(mask)[counts], torch.arange(longest).expand_as(mask)[counts]], 1)
    rows = None if counts.all() else counts.flatten().nonzero().flatten().to(device)
    lengths = tuple(counts.sum(1).tolist())
    return Batch(ids, mask.long().to(device), places.to(device), rows, lengths, tuple(text.number for text in texts))


@dataclass(frozen=True)
class BatchLimits:
    """The limits of a batch: at most `texts` texts and `tokens` tokens, padding included, with at most `length` tokens
    per text (None: no limit). Texts are not sorted by length if `in_order`."""

    texts: int
    tokens: int
    length: int | None
    in_order: bool = False


def windows(texts: Iterable[Text], tokenizer: Any, limits: BatchLimits) -> Iterator[tuple[list[Tokenized], Text]]:
    """Yield windows in order, each as (the tokenized texts of a few batches, the window's last text)."""
    waiting = iter(texts)
    while window := list(islice(waiting, _WINDOW * limits.texts)):
        yield tokenized(window, tokenizer, limits.length), window[-1]


def tokenized(texts: Sequence[Text], tokenizer: Any, length: int | None) -> list[Tokenized]:
    """Tokenize the texts with special tokens; cut texts longer than `length`, drop texts without tokens."""
    try:
        every = tokenizer([text.text for text in texts])["input_ids"]
        long = [at for at, ids in enumerate(every) if length is not None and len(ids) > length]
        if long:
            shorter = tokenizer([texts[at].text for at in long], truncation=True, max_length=length)["input_ids"]
            every = [*every]
            for at, ids in zip(long, shorter, strict=True):
                every[at] = ids
    except Exception as error:
        where = f"texts {texts[0].number} to {texts[-1].number}"
        raise cannot(f"the tokenizer cannot read {where}, {shown(texts[0].text, 40)} …", error) from None
    cut = frozenset(long)
    return [
        Tokenized(t.number, tuple(ids), at in cut) for at, (t, ids) in enumerate(zip(texts, every, strict=True)) if ids
    ]


def batches(window: Sequence[Tokenized], limits: BatchLimits) -> Iterator[list[Tokenized]]:
    """Yield the texts of a window in batches as large as the limits allow, the longest texts first."""
    batch: list[Tokenized] = []
    for text in window if limits.in_order else sorted(window, key=lambda text: -len(text.ids)):
        longest = max(len(one.ids) for one in (*batch, text))
        if batch and (len(batch) == limits.texts or longest * (len(batch) + 1) > limits.tokens):
            yield batch
            batch = []
        batch.append(text)
    if batch:
        yield batch


class Receiver:
    """Callbacks for one layer's FFN; override what you need. The rows of a tensor are the tokens at `places`."""

    def entering(self, x: Tensor, places: Tensor) -> None:
        """Receive the FFN's input [tokens, d_model]."""

    def units(self, of: UnitGroup, values: Tensor, active: Tensor, places: Tensor) -> None:
        """Receive a down projection's input `values` [tokens, d_ff], and the activation's output `active`."""

    def router(self, logits: Tensor, places: Tensor) -> None:
        """Receive a router's logits [tokens, experts], before its weights."""

    def route(self, weights: Tensor, places: Tensor) -> None:
        """Receive a router's weights [tokens, experts], zero for experts not chosen."""

    def written(self, expert: int, tokens: Tensor, values: Tensor) -> None:
        """Receive an expert's contribution [tokens, d_model] to the output of these tokens (rows of the batch)."""

    def left(self, output: Tensor) -> None:
        """Receive the sum of a mixture's contributions [tokens, d_model]."""

    def leaving(self, stream: Tensor, batch: Batch) -> None:
        """Receive the residual stream after the layer [texts, length, d_model], with padding."""


@dataclass(frozen=True)
class UnitPlaces:
    """The modules that expose a dense FFN's units: `down` reads the units; the activation `act` reads the output of
    `gate` (None: the input of `down` is the activation's output)."""

    down: str
    gate: str | None
    act: ops.Activation


def unit_places(block: Sequence[Step], owners: Mapping[str, str]) -> UnitPlaces | None:
    """Return the modules that expose the FFN's units; None if ffncli's steps must run instead. `owners`: parameter →
    module."""
    if any(isinstance(step.op, (ops.Experts, ops.Route)) for step in block) or "down.weight" not in owners:
        return None
    by_name = {step.output: step for step in block}
    acts = [step for step in block if isinstance(step.op, ops.Activation) and step.op.function != "identity"]
    between = [name for name in unit_steps(block) if not isinstance(by_name[name].op, ops.Dropout)]
    if len(acts) != 1 or acts[0].parameters() or not isinstance(acts[0].op, ops.Activation):
        return None
    (act,), op, down = acts, acts[0].op, owners["down.weight"]
    if between == [act.output]:
        return UnitPlaces(down, None, op)
    (read,) = act.inputs
    gate = owners.get(f"{read}.weight")
    others = [owner for name, owner in owners.items() if not name.startswith(f"{read}.")]
    return None if gate is None or gate in others else UnitPlaces(down, gate, op)


class _AllLeft(Exception):
    """Raised to stop a forward pass once every layer has run."""


class Listener:
    """Runs batches through a model; hooks on the layers of `live` call these layers' `receivers`."""

    def __init__(self, loaded: Pretrained, live: Mapping[Layer, LiveFFN], receivers: Mapping[Layer, Receiver]) -> None:
        self.loaded, self.busy = loaded, False
        self.batch: Batch | None = None
        self.layers = [_LayerHooks(self, layer, ffn, receivers[layer]) for layer, ffn in live.items()]

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Keep the hooks in place."""
        with ExitStack() as stack:
            stack.enter_context(demanding(self.loaded))
            stack.enter_context(torch.inference_mode())
            for layer in self.layers:
                for handle in layer.hooks():
                    stack.callback(handle.remove)
            yield

    def run(self, batch: Batch) -> None:
        """Run one forward pass, up to the last layer with hooks."""
        self.batch = batch
        for layer in self.layers:
            layer.begin()
        try:
            self.loaded.module(**batch_arguments(self.loaded, batch.ids, batch.mask))
        except _AllLeft:
            pass
        except (FFNError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if self.busy or "memory" in str(error):  # an error in a hook
                raise
            what = f"transformers cannot run {self.loaded.config.model_type} on texts {min(batch.numbers)} to"
            raise cannot(f"{what} {max(batch.numbers)}", error, ExitCode.ENVIRONMENT) from None
        for layer in self.layers:
            layer.end()

    def left(self) -> None:
        """Stop the forward pass once the last layer has run."""
        if all(layer.done for layer in self.layers):
            raise _AllLeft


class _LayerHooks:
    """The hooks of one layer. If the layer runs several times in a pass, only the first run counts."""

    def __init__(self, listener: Listener, layer: Layer, ffn: LiveFFN, receiver: Receiver) -> None:
        self.listener, self.layer, self.ffn, self.receiver = listener, layer, ffn, receiver
        self.block = ffn_steps(steps(layer.spec))
        self.places = unit_places(self.block, ffn.owners)
        needed = {**parameters(self.block), **tables(self.block)}
        self._located = [item for item in ffn.located if item.parameter in needed]
        self.logits = {step.inputs[0] for step in self.block if isinstance(step.op, ops.Route)}
        self.experts = {name: op.experts.size for name, op in routes(self.block).items()}
        self.states = state_inputs(self.block)
        self.certain = False  # whether the modules of `places` are known to be called
        self.begin()

    def begin(self) -> None:
        self.entered = self.shown = self.done = False
        self.gate: Tensor | None = None
        self.x: Tensor | None = None

    def hooks(self) -> list[Any]:
        """Put the hooks in place; return their handles."""
        find = self.listener.loaded.module.get_submodule
        handles = [find(self.ffn.enters).register_forward_pre_hook(self._ours(self._enter), with_kwargs=True)]
        if self.places is not None:
            handles.append(find(self.places.down).register_forward_pre_hook(self._ours(self._show), with_kwargs=True))
        if self.places is not None and self.places.gate is not None:
            handles.append(find(self.places.gate).register_forward_hook(self._keep_gate))
        handles.append(find(self.ffn.layer).register_forward_hook(self._ours(self._leave)))
        return handles

    def _ours(self, hook: Callable[..., None]) -> Callable[..., None]:
        """Wrap a hook so that an error in the hook is not blamed on transformers."""

        def called(*args: Any) -> None:
            self.listener.busy = True
            hook(*args)
            self.listener.busy = False

        return called

    @property
    def _batch(self) -> Batch:
        assert self.listener.batch is not None
        return self.listener.batch

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.entered:
            return
        self.entered = True
        x = self._batch.tokens_of(first_tensor(args, kwargs))
        self.receiver.entering(x, self._batch.places)
        if self.places is None:
            tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
            self._run_steps(x, dict(zip(self.states, map(self._batch.tokens_of, tensors[1:]), strict=False)))
        elif not self.certain:
            self.x = x.clone()  # in case the down projection is not called

    def _keep_gate(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.gate is None and isinstance(output, Tensor):
            self.gate = output

    def _show(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Pass the down projection's input to the receiver."""
        assert self.places is not None
        if self.shown or (self.places.gate is not None and self.gate is None):
            return
        values = self._batch.tokens_of(first_tensor(args, kwargs))
        active = values if self.gate is None else activation(self.places.act, {}, self._batch.tokens_of(self.gate))
        self.receiver.units(DENSE, values, active, self._batch.places)
        self.shown, self.certain, self.gate, self.x = True, True, None, None

    def _run_steps(self, x: Tensor, states: Mapping[str, Tensor]) -> None:
        """Compute the units with ffncli's steps instead of the model's modules; `states` come from other layers."""
        batch, (start, _), total = self._batch, ffn_span(self.block), ffn_sum(self.block)
        weights = live_weights(self.listener.loaded.module, self._located)
        inputs = {start: x, **states} | {name: batch.tokens_of(batch.ids[..., None]) for name in id_inputs(self.block)}
        unit_events, route = UnitEvents(self.block), None
        for event in execute(self.block, weights, inputs, EVAL):
            if event.name in self.logits:
                self.receiver.router(event.tensor, batch.places)
            if event.name in self.experts:
                route = event.tensor
                self.receiver.route(route, batch.places)
            if (units := unit_events.of(event)) is not None:
                places = batch.places if event.tokens is None else batch.places[event.tokens]
                self.receiver.units(units.group, units.values, units.active, places)
            if event.expert is not None and event.tokens is not None and route is not None:
                self._written(event, route)
            if event.name == total and route is not None:
                self.receiver.left(event.tensor)
        self.shown = True

    def _written(self, event: Event, route: Tensor) -> None:
        """Pass the output of an expert's program, times the expert's weight, to the receiver."""
        outer = event.name.partition(".")[0]
        experts = next(step.op for step in self.block if step.output == outer)
        assert isinstance(experts, ops.Experts)
        assert event.expert is not None
        if event.step.output != experts.program[-1].output:
            return
        share = route[event.tokens, event.expert, None] if experts.weigh == "output" else 1.0
        self.receiver.written(event.expert, event.tokens, event.tensor * share)  # type: ignore[arg-type]

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.done:
            return
        stream = output[0] if isinstance(output, (tuple, list)) else output
        if isinstance(stream, Tensor):
            self.receiver.leaving(stream, self._batch)
        self.done = True
        self.listener.busy = False
        self.listener.left()

    def end(self) -> None:
        """Finish a pass. If the down projection was not called, run the layer's steps now and in later passes."""
        if self.entered and not self.shown and self.x is not None:
            self.places = None
            self._run_steps(self.x, {})


def inputs_of(loaded: Pretrained, live: Mapping[Layer, LiveFFN], batch: Batch) -> list[Tensor]:
    """Return each FFN's input [tokens, d_model] in one pass, in the order in which the layers run."""
    inputs = _FFNInputs()
    listener = Listener(loaded, live, dict.fromkeys(live, inputs))
    with listener.listening():
        listener.run(batch)
    return inputs.seen


class _FFNInputs(Receiver):
    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def entering(self, x: Tensor, places: Tensor) -> None:
        self.seen.append(x.clone())
