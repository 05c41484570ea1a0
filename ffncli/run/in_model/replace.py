"""Replace the FFNs of a loaded transformers model by kernels that are verified first, and restore them."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor, nn

from ffncli.block.recipe import FFNSpec
from ffncli.block.steps import Route, Step, block_inputs
from ffncli.errors import ExitCode, FFNError, shown
from ffncli.kernels.choice import KernelChoice
from ffncli.models.model import Layer, Resolved
from ffncli.run.engine.prepare import dtype_name
from ffncli.run.engine.reference import in_float64, steady_tokens
from ffncli.run.in_model import find
from ffncli.run.in_model.find import FoundFFN, NotReplaced
from ffncli.run.in_model.kernel_call import SharedKernel, built
from ffncli.run.in_model.swap import FFNSwap
from ffncli.run.measure.gap import declared_tolerance, gap, tolerance_for
from ffncli.run.user.kernels import kernel_of
from ffncli.run.user.module import described
from ffncli.show.text import plural

TOKENS = (1, 16)  # default token counts of the inputs on which a kernel is verified
Choose = Callable[[FFNSpec, torch.dtype, str], tuple[KernelChoice, str]]  # (the kernel, a note on the choice or "")


class NothingReplaced(FFNError):
    """Raised if no FFN of a model could be replaced; the message gives the first reason."""


@dataclass(frozen=True)
class ReplacedFFN:
    """One FFN computed by a kernel: its path in the model, and the kernel's name.

    `error` is max|a-b| / max|b| of the kernel compared with float64, the maximum over the verified inputs;
    `model_error` is the same error of the model's own FFN; `tolerance` is the kernel's limit. `copied_bytes` counts the
    bytes of weights that the kernel does not share with the model.
    """

    path: str
    layer: str
    kernel: str
    error: float
    model_error: float
    tolerance: float
    copied_bytes: int


@dataclass(frozen=True)
class KeptFFN:
    """One FFN that was not replaced, and the reason."""

    layer: str
    reason: str


class Replaced:
    """The result of `ffncli.replace`; `restore`, or the end of a `with` block, undoes the replacement.

    `ffns` are the replaced FFNs, `kept` the FFNs that were not replaced; `notes` explain the choice of kernels.
    """

    def __init__(
        self, ffns: Sequence[ReplacedFFN], kept: Sequence[KeptFFN], swaps: Sequence[FFNSwap], notes: Iterable[str]
    ) -> None:
        self.ffns, self.kept, self.notes, self._swaps = tuple(ffns), tuple(kept), tuple(notes), tuple(swaps)

    @property
    def calls(self) -> dict[str, int]:
        """The number of FFN calls computed by kernels (`kernel`), and of FFN calls computed by the model, by reason;
        a call inside torch.compile counts once, when it is traced."""
        total: Counter[str] = Counter()
        for swap in self._swaps:
            total += swap.calls
        return dict(total)

    @property
    def active(self) -> bool:
        """Whether the kernels are in place."""
        return any(swap.on for swap in self._swaps)

    def apply(self) -> None:
        """Put the kernels in place again after `restore`."""
        for swap in self._swaps:
            swap.turn_on()

    def restore(self) -> None:
        """Restore the model's own FFNs; a second call does nothing.

        Raise FFNError if something else has replaced a forward since; all other FFNs are restored first.
        """
        errors = []
        for swap in self._swaps:
            try:
                swap.turn_off()
            except FFNError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def refresh(self) -> None:
        """Prepare the kernels' weights again from the model's current weights.

        This is only needed after a write to single values that torch does not count, such as a write through `.data`.
        """
        for swap in self._swaps:
            swap.weights.renew()

    def __enter__(self) -> "Replaced":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def __repr__(self) -> str:
        names = " and ".join(dict.fromkeys(ffn.kernel for ffn in self.ffns))
        kept = f", {len(self.kept)} kept" if self.kept else ""
        where = "in place" if self.active else "restored"
        return f"<{len(self.ffns)} {plural('FFN', len(self.ffns))} by {names}{kept}, {where}>"


def replace_ffns(
    model: nn.Module,
    choose: Choose,
    tokens: Sequence[int] = TOKENS,
    layers: int | str | Sequence[int | str] | None = None,
) -> Replaced:
    """Replace every FFN of the model by the kernel that `choose` names for its block, verified on random tokens.

    All kernels are verified before the first FFN is replaced. Raise FFNError for a model of an unknown family, for a
    model without a replaceable FFN, and (exit code 1) for a kernel whose output is not the block's output.
    """
    resolved = described(model)
    work = _Replacing(model, resolved, choose, tuple(tokens))
    swaps: list[FFNSwap] = []
    ffns: list[ReplacedFFN] = []
    kept: list[KeptFFN] = []
    places: set[tuple[str, ...]] = set()
    with _in_eval(model), torch.no_grad():
        for layer in find.chosen_layers(resolved, layers):
            name = f"{layer.stack}.{layer.index}"
            try:
                ffn, swap, made = work.replaced(layer, name, places)
            except NotReplaced as reason:
                kept.append(KeptFFN(name, str(reason)))
                continue
            places.add(ffn.modules)
            if swap is not None and made is not None:  # a layer that runs several times is replaced once
                swaps.append(swap)
                ffns.append(made)
    if not ffns:
        first = kept[0] if kept else KeptFFN("", "it has none")
        raise NothingReplaced(f"no FFN of {type(model).__name__} was replaced: {first.reason}", f"layer {first.layer}")
    for swap in swaps:
        swap.turn_on()
    return Replaced(ffns, kept, swaps, work.notes)


class _Replacing:
    """The state of one `replace_ffns` call: the kernels built so far; layers with equal blocks share a kernel."""

    def __init__(self, model: nn.Module, resolved: Resolved, choose: Choose, tokens: tuple[int, ...]) -> None:
        self.model, self.resolved, self.choose, self.tokens = model, resolved, choose, tokens
        self.notes: dict[str, None] = {}
        self._built: dict[tuple[FFNSpec, torch.dtype, str], SharedKernel] = {}

    def replaced(
        self, layer: Layer, name: str, places: set[tuple[str, ...]]
    ) -> tuple[FoundFFN, FFNSwap | None, ReplacedFFN | None]:
        """Verify the kernel for one layer's FFN. Raise NotReplaced with the reason, FFNError if the kernel is wrong."""
        ffn = find.find_ffn(self.model, self.resolved, layer)
        if ffn.modules in places:
            return ffn, None, None
        find.require_plain_forward(self.model, ffn)
        weights = find.kernel_weights(self.model, ffn)
        like = weights["down.weight"]
        if not like.is_floating_point():
            raise NotReplaced(f"its weights are {dtype_name(like.dtype)}")
        cases = [_VerifiedInput(ffn.block, weights, _drawn(ffn, count, like), layer.spec) for count in self.tokens]
        if not any(case.steady.any() for case in cases):
            raise NotReplaced("rounding decides which experts compute the tokens, so no output can be verified")
        ffn, model_error = self._by_modules(ffn, cases)
        if ffn.modules in places:
            return ffn, None, None
        ready = self._kernel(layer.spec, ffn.block, like)
        swap = FFNSwap(self.model, ffn, ready, self.tokens)
        error = max(_kernel_error(case, ready, swap, name) for case in cases)
        limit = _limit(cases[0], ready)
        made = ReplacedFFN(ffn.label, name, ready.kernel.name, error, model_error, limit, swap.weights.copied_bytes)
        return ffn, swap, made

    def _by_modules(self, ffn: FoundFFN, cases: "Sequence[_VerifiedInput]") -> tuple[FoundFFN, float]:
        """Return (the FFN as modules that compute nothing but the FFN, their maximum error), or raise NotReplaced."""
        try:
            return ffn, max(_module_error(self.model, ffn, case) for case in cases)
        except NotReplaced:
            if len(ffn.modules) > 1:
                raise
            try:
                row = find.row_of(self.model, ffn)
                return row, max(_module_error(self.model, row, case) for case in cases)
            except NotReplaced:
                pass
            raise

    def _kernel(self, spec: FFNSpec, block: Sequence[Step], like: Tensor) -> SharedKernel:
        key = (spec, like.dtype, str(like.device))
        if key not in self._built:
            choice, note = self.choose(spec, like.dtype, str(like.device))
            self.notes |= {note: None} if note else {}
            if choice.factor is not None:
                raise FFNError(f"{shown(choice.text)} can only be timed", f"name {shown(choice.kernel)} itself")
            try:
                self._built[key] = built(kernel_of(choice, block, spec), block, like.device, like.dtype)
            except FFNError as error:
                raise NotReplaced(error.message) from None
        return self._built[key]


class _VerifiedInput:
    """An FFN's weights and one input, the output in float64, and the error that rounding may cause."""

    def __init__(self, block: Sequence[Step], weights: dict[str, Tensor], x: Tensor, spec: FFNSpec) -> None:
        self.block, self.x = block, x
        (entry,) = block_inputs(block)
        inputs = {entry: x}
        self.reference, _ = in_float64(block, weights, inputs)
        self.steady = steady_tokens(block, weights, inputs, x.dtype)[0].to(x.device)
        fixed = any(isinstance(step.op, Route) and step.op.score_dtype == "fp32" for step in block)
        width = max(spec.d_model, spec.d_ff, spec.shared_width)
        self.tolerance = tolerance_for(x.dtype, width, torch.float32 if fixed else None)

    def error(self, out: object, whose: str) -> float:
        """Return max|a-b| / max|b| over the tokens that go to the same experts regardless of rounding.

        Raise NotReplaced if `out` cannot be the block's output.
        """
        if not isinstance(out, Tensor):
            raise NotReplaced(f"{whose} returns a {type(out).__name__}, not one tensor")
        if out.numel() != self.x.numel() or out.dtype != self.x.dtype:
            raise NotReplaced(f"{whose} returns {dtype_name(out.dtype)} {list(out.shape)}")
        apart = gap(out.reshape(self.x.shape)[self.steady], self.reference[self.steady])
        return float("inf") if apart.unlike else apart.relative


def _drawn(ffn: FoundFFN, count: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, ffn.width, generator=generator).to(like.device, like.dtype)


def _module_error(model: nn.Module, ffn: FoundFFN, case: _VerifiedInput) -> float:
    """Return the error of the model's own modules. Raise NotReplaced if they do not compute the block."""
    whose = f"{type(model.get_submodule(ffn.modules[0])).__name__} ({ffn.label})"
    out: object = case.x[None]
    try:
        for path in _called(ffn):
            out = model.get_submodule(path)(out)
    except Exception as error:
        text = " ".join(str(error).split())[:120]
        raise NotReplaced(f"{whose} does not take its input alone: {type(error).__name__}: {text}") from None
    value = case.error(out, whose)
    if value > case.tolerance:
        what = f"{whose} does not compute exactly its FFN from its current parameters"
        raise NotReplaced(f"{what}: its error against float64 is {value:.1e}, more than {case.tolerance:.1e}")
    return value


def _called(ffn: FoundFFN) -> list[str]:
    """Return the modules in the order of their calls, with only the first candidate for the activation."""
    if len(ffn.modules) == 1:
        return [*ffn.modules]
    owners = {item.names[0].rpartition(".")[0] for item in ffn.located if not item.parameter.startswith("act.")}
    acts = [path for path in ffn.modules if path not in owners]
    return [path for path in ffn.modules if path in owners or path == acts[0]]


def _kernel_error(case: _VerifiedInput, ready: SharedKernel, swap: FFNSwap, name: str) -> float:
    """Return the kernel's error on the case's input; raise FFNError (exit code 1) if the kernel is wrong."""
    where = f"{ready.kernel.name} on {swap.ffn.label}"
    params, x = swap.weights.now(), case.x.clone()
    assert params is not None  # the weights were prepared just now
    before = [tensor._version for tensor in params if not tensor.is_inference()]
    try:
        value = case.error(ready.compute(x, params), ready.kernel.name)
    except NotReplaced as reason:
        raise FFNError(f"{where}: {reason}", "nothing was replaced", ExitCode.FAILED) from None
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError) as error:
        text = " ".join(str(error).split())[:160]
        raise FFNError(f"{where}: {type(error).__name__}: {text}", "nothing was replaced", ExitCode.FAILED) from None
    if not torch.equal(x, case.x) or before != [tensor._version for tensor in params if not tensor.is_inference()]:
        raise FFNError(f"{where} changes its input or its weights", "nothing was replaced", ExitCode.FAILED)
    if not value <= (limit := _limit(case, ready)):
        what = f"{where} is wrong: its error against float64 is {value:.1e}, more than {limit:.1e} (layer {name})"
        raise FFNError(what, "nothing was replaced", ExitCode.FAILED)
    return value


def _limit(case: _VerifiedInput, ready: SharedKernel) -> float:
    """Return the kernel's maximum error: the limit of the dtype, or of a coarser format that the kernel declares."""
    computes = ready.kernel.computes
    return max(case.tolerance, declared_tolerance(computes)[0]) if computes else case.tolerance


@contextmanager
def _in_eval(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode without autocast; on exit, restore the mode of every module."""
    modes = [(part, part.training) for part in model.modules()]
    kind = next((p.device.type for p in model.parameters() if not p.is_meta), "cpu")
    try:
        model.eval()
        with torch.autocast(kind, enabled=False):
            yield
    finally:
        for part, training in modes:
            part.training = training
