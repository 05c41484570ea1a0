"""Choose the kernels that a benchmark compares; users' files are parsed but not run. Also read the certificates of `ffn
verify --referee` that result rows refer to; each must certify a kernel that the benchmark runs."""

import ast
import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from ffncli.bench.records import OWN_ARMS, Case
from ffncli.block import activations
from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.shard import Ranks
from ffncli.errors import ExitCode, FFNError, did_you_mean, option, shown, shown_path
from ffncli.kernels import AUTO, BUILT_IN, BY_DEFAULT, ONLY_NAMED, OVER_RANKS, computing
from ffncli.kernels.choice import KernelChoice, choices, missing_weight, parse, require_unlike
from ffncli.kernels.kernel import interprets_triton, kernel_steps
from ffncli.models.files.json_records import OneOf, known_fields
from ffncli.models.files.strict_json import read_object
from ffncli.run.user.surroundings import changed
from ffncli.run.verify.certificate import CERTIFY_AGAIN, Certificate, certificate_of
from ffncli.system.files import file_at, read_whole, sha256_of
from ffncli.version import __version__

ONE_RANK = Ranks()
MOST_KERNEL_BYTES = 10_000_000  # limit of a Python file
_MOST_CERTIFICATE_BYTES = 10_000_000


@dataclass(frozen=True)
class ChosenKernels:
    """The chosen kernels. `kernels` are in the requested order, each with its label; a baseline that was not requested
    comes first.

    `baseline` is the baseline's label; `files` maps the absolute paths of the users' files to their sha256. `functions`
    are the kernels defined with a plain `def`, each paired with its file's name.
    """

    kernels: tuple[KernelChoice, ...]
    baseline: str
    files: Mapping[str, str]
    notes: tuple[str, ...] = ()
    functions: tuple[tuple[str, ast.FunctionDef], ...] = ()


def choose_kernels(
    texts: Sequence[str] | None, baseline: str | None, ranks: Ranks = ONE_RANK, specs: Sequence[FFNSpec] = ()
) -> ChosenKernels:
    """Choose the kernels and the baseline. If `texts` is None, choose all built-in kernels that compute the kinds of
    block in `specs`, except kernels that only run on request. Over `ranks`, the default kernels are eager on each
    rank's part of the block, and `dtensor`, which splits the block with torch's DTensor; only DTensor supports experts
    on other ranks.

    The baseline defaults to eager if eager is measured, otherwise to the first kernel; a single kernel is compared with
    eager. Raises FFNError for an unknown kernel, for a file that does not exist, is not Python or does not define the
    kernel, and if Triton would interpret its kernels instead of compiling them.
    """
    if interprets_triton():
        why = "TRITON_INTERPRET is set: Triton kernels would run as Python, and their times would mean nothing"
        raise FFNError(why, "unset it; `ffn verify` can use it", ExitCode.ENVIRONMENT)
    over_ranks, whole_experts = ranks.world_size > 1, ranks.ep == 1
    dense = not specs or any(not spec.moe for spec in specs)  # without specs, both kinds are possible
    mixture = not specs or any(spec.moe for spec in specs)
    by_default, left_out = (computing(names, dense, mixture) for names in (BY_DEFAULT, ONLY_NAMED))
    default = ((*(("eager",) if whole_experts else ()), *OVER_RANKS)) if over_ranks else by_default
    files: dict[str, str] = {}
    functions: list[tuple[str, ast.FunctionDef]] = []
    kernels = tuple(_named(choice, files, functions) for choice in choices(texts or default))
    labels = [kernel.label for kernel in kernels]
    require_unlike(labels)
    if over_ranks and any(kernel.kernel == AUTO for kernel in kernels):
        raise FFNError(
            f"{option('kernel')}: auto chooses among kernels of whole blocks", "list kernels, as in -k eager,dtensor"
        )
    if not over_ranks and (needs := next((label for label in labels if label in OVER_RANKS), None)):
        raise FFNError(
            f"{option('kernel')}: {needs} computes blocks that are split over ranks", f"add {option('tp', 'N')}"
        )
    notes: tuple[str, ...] = ()
    if not texts and not over_ranks:
        notes = (f"timed only if named: {', '.join(left_out)}; {option('kernel', 'all')} adds them",)
    if baseline is None and len(kernels) == 1 and "eager" not in labels and whole_experts:
        baseline, notes = "eager", (f"compared with eager; {option('baseline', 'NAME')} chooses another",)
    if baseline is None:
        baseline = "eager" if "eager" in labels else labels[0]
    if baseline not in labels:
        try:
            choice = parse(baseline)
        except FFNError:
            hint = did_you_mean(baseline, [*labels, *BUILT_IN], f"measured: {', '.join(labels)}")
            raise FFNError(f"{option('baseline')}: there is no kernel {shown(baseline)}", hint) from None
        base = _named(choice, files, functions)
        kernels = kernels if base in kernels else (base, *kernels)
        baseline = base.label
        require_unlike([kernel.label for kernel in kernels])
    return ChosenKernels(kernels, baseline, files, notes, tuple(functions))


def _named(choice: KernelChoice, files: dict[str, str], functions: list[tuple[str, ast.FunctionDef]]) -> KernelChoice:
    """Return the choice with its kernel's name, if it can be read from the user's file. Adds the file to `files`, and
    the kernel to `functions` if the kernel is a plain function.

    If the choice names a git reference, it is replaced by the commit's hash, which fixes the file's contents: a branch
    may move on.
    """
    path = choice.file
    if path is not None:
        where, commit = shown_path(path), None
        if choice.ref is not None:
            at_commit = file_at(choice.ref, path, option("kernel"))
            raw, commit, where = at_commit.data, at_commit.commit, f"{where} at {shown(choice.ref)}"
        else:
            raw = _read(path)
            files[str(path)] = hashlib.sha256(raw).hexdigest()
        tree = _parsed(raw, where)
        choice = replace(choice.with_attribute(_attribute(path, choice.attribute, tree)), ref=commit)
        functions += [(where, function) for function in _functions(tree, choice.attribute)]
    if choice.label in OWN_ARMS:
        raise FFNError(
            f"{option('kernel')}: {shown(choice.label)} is reserved for ffn's measurements", "give another label"
        )
    return choice


def _read(path: Path) -> bytes:
    try:
        return read_whole(path, MOST_KERNEL_BYTES)
    except OSError as error:
        raise FFNError(
            f"{option('kernel')}: cannot read {shown_path(path)}: {error.strerror}", "give file.py:name"
        ) from None
    except ValueError:
        raise FFNError(f"{option('kernel')}: {shown(str(path))} is not a file name") from None


def _parsed(raw: bytes, name: str) -> ast.Module:
    """Parse a file's bytes as Python, without running them."""
    try:
        with warnings.catch_warnings(action="ignore"):  # Python warns again when the file is imported
            return ast.parse(raw)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        why = error.msg if isinstance(error, SyntaxError) else str(error)
        raise FFNError(f"{name}{where}: {why}", "it is not valid Python") from None


_Code = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
_MAKE_NAMES = {"globals", "vars", "locals", "exec", "eval", "setattr", "__dict__", "__getattr__", "modules"}


def _bound(tree: ast.Module) -> set[str]:
    """Return the names that the file's code binds by def, class, assignment and import, in any branch."""
    names: set[str] = set()
    left: list[ast.AST] = [tree]
    while left:
        for node in ast.iter_child_nodes(left.pop()):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    names.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    names.add(name)
                case ast.alias(name=name, asname=asname):
                    names.add(asname or name.partition(".")[0])
            if not isinstance(node, _Code):
                left.append(node)
    return names


def _makes_names(tree: ast.Module) -> bool:
    """Return whether the file may define names in ways that cannot be seen without running it."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.FunctionDef(name=name) if name in _MAKE_NAMES:
                return True
            case ast.alias(name="*") | ast.Global() | ast.MatchAs() | ast.MatchStar() | ast.MatchMapping():
                return True
    return False


def _functions(tree: ast.Module, name: str | None) -> list[ast.FunctionDef]:
    """Return the only definition of `name`, if it is a plain `def` that nothing can replace; otherwise []."""
    defined = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    rest = ast.Module([node for node in tree.body if node not in defined], [])
    plain = len(defined) == 1 and not defined[0].decorator_list
    return defined if plain and name not in _bound(rest) and not _makes_names(tree) else []


def _attribute(path: Path, name: str | None, tree: ast.Module) -> str:
    """Return the kernel's name: `name` or, if `name` is None, the name of the file's only kernel."""
    defined = [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    if name is not None:
        if name not in _bound(tree) and not _makes_names(tree):
            hint = did_you_mean(name, defined, f"it has {', '.join(defined) or 'no function and no class'}")
            raise FFNError(f"{shown_path(path)} has no {shown(name)}", hint)
        return name
    public = [n for n in defined if not n.startswith("_")]
    if len(public) != 1:
        there = ", ".join(public) or "no function and no class"
        hint = f"name one, as in {path.name}:name; it has {there}"
        raise FFNError(f"{shown_path(path)} has {len(public)} kernels", hint)
    return public[0]


# --- the arguments of a user's function -------------------------------------------------------------------------------
# -------------------------------------------------------------------------------------


def require_arguments(chosen: ChosenKernels, cases: Sequence[Case]) -> None:
    """Raise FFNError (exit 2) for a function that no case can call, as far as its source shows without running it."""
    specs = dict.fromkeys(case.spec for case in cases)
    for where, function in chosen.functions:
        arguments, places = function.args, [*function.args.posonlyargs, *function.args.args]
        # The first argument is x.
        required = [one.arg for one in places[1 : max(1, len(places) - len(arguments.defaults))]]
        keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        required += [one.arg for one, default in keywords if default is None]
        refusals = [missing_weight(required, kernel_steps(steps(spec))) for spec in specs]
        if refusals and (first := refusals[0]) and all(refusals):
            why, hint = first
            raise FFNError(f"{where}: {function.name}({ast.unparse(function.args)}) {why}", hint)


# --- certificates of kernels ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NamedCertificate:
    """A kernel's certificate for a dtype, a device and a kind of block; `digest` is the sha256 of the certificate's
    file."""

    digest: str
    dtype: str
    device: str
    activation: str
    gated: bool
    experts: bool

    def covers(self, case: Case) -> bool:
        """Return whether the certificate covers the case; widths and token counts may differ from the certified
        ones."""
        spec = case.spec
        same = (spec.activation, bool(spec.gated), spec.moe is not None) == (self.activation, self.gated, self.experts)
        return same and (case.dtype, case.device, case.passes) == (self.dtype, self.device, "forward")


@dataclass(frozen=True)
class _CertifiedBlock:
    activation: Annotated[str, OneOf(tuple(activations.TABLE))]
    gated: bool
    experts: int | None


def named_certificates(
    files: Sequence[str], chosen: ChosenKernels, cases: Sequence[Case]
) -> Mapping[str, NamedCertificate]:
    """Map labels to certificates. Raises FFNError (exit 2) for a file that is not a certificate, or that certifies
    something that is not measured."""
    by_label: dict[str, NamedCertificate] = {}
    for name in files:
        path = Path(name).expanduser()
        stored = read_object(path, _MOST_CERTIFICATE_BYTES)
        certificate, where = certificate_of(stored, shown_path(path)), shown_path(path)
        if certificate.verdict != "certified":
            raise FFNError(f"{where} says {certificate.verdict}", "only certified kernels can be named")
        block: _CertifiedBlock = known_fields(_CertifiedBlock, stored.get("block"), f"{where}: block", CERTIFY_AGAIN)
        kernels = [choice for choice in chosen.kernels if _is_of(certificate, choice)]
        if not kernels:
            hint = f"name it: {option('kernel', 'file.py:name')}"
            raise FFNError(f"{where} certifies {shown(certificate.kernel)}, which is not measured", hint)
        for choice in kernels:
            _require_same(where, certificate, choice, chosen)
        kind = (certificate.dtype, certificate.device, block.activation, block.gated, bool(block.experts))
        named = NamedCertificate(sha256_of(path), *kind)
        if not any(named.covers(case) for case in cases):
            of = f"{named.dtype}, {named.activation}{', gated' if named.gated else ''}, on {named.device}"
            raise FFNError(f"{where} is for {of}, which no case measures", "certify the kernel for this block")
        by_label |= {choice.label: named for choice in kernels}
    return by_label


def _is_of(certificate: Certificate, choice: KernelChoice) -> bool:
    """Return whether the certificate is about this kernel; a slowed kernel is a different kernel."""
    if choice.factor is not None:
        return False
    if choice.file is None:
        return certificate.file is None and certificate.kernel == choice.kernel
    same_file = certificate.file is not None and Path(certificate.file).name == choice.file.name
    return same_file and certificate.attribute == choice.attribute


def _require_same(where: str, certificate: Certificate, choice: KernelChoice, chosen: ChosenKernels) -> None:
    """Raise FFNError unless the kernel's file or, for a built-in kernel, the version of ffncli is the certified one."""
    if choice.file is not None and certificate.sha256 != chosen.files[str(choice.file)]:
        why = f"{shown_path(choice.file)} is not the file that {where} certifies (different sha256)"
        raise FFNError(why, "certify it again: ffn verify --referee")
    if choice.file is not None and (other := changed(certificate.files, certificate.variables, choice.file)):
        why = f"{other} is not as {where} certifies it, and {shown_path(choice.file)} reads it"
        raise FFNError(why, "certify it again: ffn verify --referee")
    version = certificate.environment.get("ffncli")
    if choice.file is None and version != __version__:
        why = f"{where} certifies {choice.kernel} of ffn {shown(version)}, but this is {__version__}"
        raise FFNError(why, "certify it again: ffn verify --referee")
