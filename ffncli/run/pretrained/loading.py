"""Loading a model with transformers: offline, from safetensors or a GGUF file, without custom code.

Only the weights that the requested layers need are read: later layers and an untied head are removed from the module
before weights are loaded, and the memory for the remaining weights is compared with the free memory.

transformers parses a GGUF file three times, for the config, the tokenizer and the weights (two to four seconds each for
a vocabulary of 49,152). It also builds gguf's table of names for each submodule, and dequantizes layers that the model
does not have. With `shared_reader`, a file is parsed once, a table is built once, and these layers are skipped.
"""

import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from functools import cache, partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ffncli.errors import ExitCode, FFNError, option, shown, shown_path
from ffncli.models.files.strict_json import MOST_CONFIG_BYTES, read_object
from ffncli.models.model import Resolved, is_gguf, loaded_parameters
from ffncli.run.engine.prepare import dtype_of
from ffncli.run.engine.weights import require_memory
from ffncli.show.text import bytes_text
from ffncli.system.packages import extra_command, installed, logs_disabled

_DEQUANTIZED = 1e7  # parameters per second, on two cores
_LONGEST = 200  # maximum length shown of another library's error message, in characters
_HEADS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT")


@dataclass(frozen=True)
class Pretrained:
    """A loaded model: `module` in eval mode, its config, and the names of parameters missing from the files."""

    module: Any
    config: Any
    missing: tuple[str, ...]


@contextmanager
def offline() -> Iterator[Any]:
    """Import transformers and yield it, without log output and network access, regardless of the environment."""
    with logs_disabled(), warnings.catch_warnings(), nullcontext() if installed("gguf") is None else shared_reader():
        warnings.simplefilter("ignore")
        transformers, hub = _offline_modules()
        was_offline, hub.HF_HUB_OFFLINE = hub.HF_HUB_OFFLINE, True
        bars = transformers.logging.is_progress_bar_enabled()
        transformers.logging.disable_progress_bar()
        try:
            yield transformers
        finally:
            hub.HF_HUB_OFFLINE = was_offline
            if bars:
                transformers.logging.enable_progress_bar()


def _offline_modules() -> tuple[Any, Any]:
    """Import transformers and huggingface_hub's constants, which read the environment only now."""
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import huggingface_hub.constants
        import transformers
    except ImportError:
        hint = extra_command("models")
        raise FFNError("running a model needs the transformers library", hint, ExitCode.ENVIRONMENT) from None
    finally:
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before
    return transformers, huggingface_hub.constants


def arguments_for(path: Path) -> dict[str, Any]:
    """Return the arguments with which transformers' `from_pretrained` reads a directory or a GGUF file from disk."""
    disk = {"local_files_only": True, "trust_remote_code": False}
    if is_gguf(path):
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name, **disk}
    return {"pretrained_model_name_or_path": path, **disk}


def read_config(transformers: Any, path: Path) -> Any:
    """Read the model's config with transformers, adjusted for a single run."""
    config = _gguf_config(transformers, path) if is_gguf(path) else _folder_config(transformers, path)
    for name, value in (("use_cache", False), ("chunk_size_feed_forward", 0)):  # call each FFN once, and keep no cache
        if hasattr(config, name):
            setattr(config, name, value)
    packed = getattr(config, "quantization_config", None)
    if isinstance(packed, dict) and packed.get("quant_method") in ("fp8", "mxfp4", "mxfp8", "compressed-tensors"):
        packed["dequantize"] = True  # otherwise a GPU also rounds activations
    return config


def _folder_config(transformers: Any, folder: Path) -> Any:
    where = shown_path(folder / "config.json")
    values = read_object(folder / "config.json", MOST_CONFIG_BYTES, constants=True)
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        if "auto_map" in values:
            raise FFNError(f"{where}: {shown(kind)} needs custom code, which is never run")
        raise FFNError(
            f"{where}: transformers {transformers.__version__} does not know the model_type {shown(kind)}",
            "`ffn trace` without a prompt may run its layers",
            ExitCode.ENVIRONMENT,
        )
    try:
        return transformers.AutoConfig.from_pretrained(**arguments_for(folder))
    except Exception as error:  # transformers' validators raise a dozen exception types
        raise cannot(f"{where}: transformers rejects it", error) from None


def _gguf_config(transformers: Any, path: Path) -> Any:
    """Return the config that transformers derives from a GGUF file's metadata.

    If transformers cannot derive a config, converting the file does not help: no other library turns a GGUF file back
    into a transformers model, and transformers does not save a model that it has read from a GGUF file.
    """
    if installed("accelerate") is None:
        what = f"{shown_path(path)}: transformers needs the accelerate library to load a GGUF file"
        raise FFNError(what, extra_command("models"), ExitCode.ENVIRONMENT)
    try:
        return transformers.AutoConfig.from_pretrained(**arguments_for(path))
    except Exception as error:
        what = f"{shown_path(path)}: transformers {transformers.__version__} cannot load it"
        hint = "give the directory with safetensors that it was made from, or trace without a prompt"
        raise cannot(what, error, ExitCode.ENVIRONMENT, hint) from None


def loading_notes(resolved: Resolved, last_layer: int, dtype: str | None) -> tuple[str, ...]:
    """Return the notes to show before a model is loaded up to a layer: the memory and time needed for a GGUF file."""
    checkpoint = resolved.checkpoint
    if checkpoint is None or not checkpoint.gguf:
        return ()
    count = loaded_parameters(checkpoint, last_layer)
    size, seconds = bytes_text(count * dtype_of(dtype).itemsize), max(1, round(count / _DEQUANTIZED))
    what = f"{size} of memory in {dtype or 'fp32'}, about {seconds:,} s"
    return (f"transformers dequantizes the GGUF file to run the prompt: {what}",)


def load(
    transformers: Any, path: Path, config: Any, dtype: torch.dtype, device: str,
    shrink: Callable[[Any, bool], None] = lambda module, lean: None, with_head: bool = False,
) -> Pretrained:  # fmt: skip
    """Load the model in eval mode, in `dtype` on `device`, after `shrink` has removed unneeded parts from the empty
    module.

    If transformers fails without these parts, the model is loaded again with `shrink(module, False)`, which keeps them.
    The weights of a GGUF file are dequantized.
    """
    # The tensor names in a GGUF file match the whole model, so prefer the model's class with a head.
    kind = _class(transformers, config, with_head, is_gguf(path))

    def prepare(module: Any, lean: bool) -> None:
        shrink(module, lean)
        if lean and not with_head:
            _without_head(module)
        if is_gguf(path):
            with shared_reader() as readers:
                readers.tensors_of(module)
        size = sum(p.numel() for p in module.parameters()) * dtype.itemsize
        advice = f"take a lower {option('layer')} or {option('dtype', 'bf16')}"
        require_memory(size, f"{kind.__name__} up to this layer", advice)

    options = arguments_for(path) | {
        "config": config, "dtype": dtype, "use_safetensors": True, "output_loading_info": True,
        "ignore_mismatched_sizes": True,
    }  # fmt: skip
    if is_gguf(path) and hasattr(transformers, "GgufConfig"):  # transformers 5.23 and later may keep weights packed
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    for lean in (True, False):
        try:
            # For a GGUF file, transformers shows a progress bar regardless of its settings.
            with redirect_stderr(StringIO()) if is_gguf(path) else nullcontext():
                module, info = _prepared(kind, partial(prepare, lean=lean)).from_pretrained(**options)
            module.set_experts_implementation("eager")  # fused experts do not support float64
            break
        except FFNError:
            raise
        except Exception as error:
            if lean and not isinstance(error, ImportError):
                continue
            code = ExitCode.ENVIRONMENT if isinstance(error, (ImportError, MemoryError)) else ExitCode.USAGE
            raise cannot(f"{shown_path(path)}: transformers cannot load it", error, code) from None
    if unlike := sorted(info["mismatched_keys"]):  # listed by transformers only with ignore_mismatched_sizes
        name, shape, expected = unlike[0]
        shapes = f"has shape {list(shape)}, but the model needs {list(expected)}"
        what = f"{shown_path(path)}: tensor {shown(name, 120)} {shapes}"
        raise FFNError(what, "config.json and the tensors do not belong to the same model")
    return Pretrained(module.eval().to(device), config, tuple(sorted(info["missing_keys"])))


def load_for_logits(transformers: Any, path: Path, config: Any, device: str) -> tuple[Pretrained, bool]:
    """Load the model, with its language-model head if it has one; return it, and whether it has."""
    try:
        loaded = load(transformers, path, config, torch.float32, device, with_head=True)
    except FFNError as error:
        if "no language-model head" not in error.message:
            raise
    else:
        prefix = f"{loaded.module.base_model_prefix}."
        if all(name.startswith(prefix) for name in loaded.missing):
            return loaded, True
    loaded = load(transformers, path, config, torch.float32, device)
    if hasattr(loaded.module, "pooler"):
        loaded.module.pooler = None  # it reads the last hidden state, and checkpoints often lack it
    return loaded, False


def cannot(what: str, error: BaseException, code: ExitCode = ExitCode.USAGE, hint: str = "") -> FFNError:
    """Return an FFNError with another library's exception as one line."""
    text = " ".join(str(error).split())  # join lines, because the reason is often in the second line
    text = text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
    return FFNError(": ".join(filter(None, (what, type(error).__name__, text))), hint, code)


@contextmanager
def demanding(loaded: Pretrained) -> Iterator[None]:
    """A context in which calling a module raises FFNError if the files lack one of its parameters.

    transformers fills missing parameters with random values and only logs that. Missing parameters of a module that is
    never called, such as a pooler, do no harm.
    """
    handles = []
    for name in loaded.missing:
        owner, _, _ = name.rpartition(".")

        def refuse(module: nn.Module, args: Any, name: str = name) -> None:
            raise FFNError(f"the checkpoint has no {shown(name, 120)}, which the model needs to run")

        try:
            handles.append(loaded.module.get_submodule(owner).register_forward_pre_hook(refuse))
        except AttributeError:  # its module was removed
            continue
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _prepared(kind: Any, prepare: Callable[[Any], None]) -> Any:
    """Return a subclass whose constructor calls `prepare` at its end, while the module is still empty."""

    def make(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, config, *args, **kwargs)
        prepare(self)

    return type(kind.__name__, (kind,), {"__init__": make, "__module__": kind.__module__, "__doc__": kind.__doc__})


def _class(transformers: Any, config: Any, with_head: bool, prefer_head: bool = False) -> Any:
    """Return the model class that the config names, or else the class that transformers uses for this config."""
    named = [getattr(transformers, str(name), None) for name in getattr(config, "architectures", None) or ()]
    # BART has both kinds of heads; an encoder-decoder model uses the sequence-to-sequence head.
    heads = sorted(_HEADS, key=lambda head: config.is_encoder_decoder and "SEQ_TO_SEQ" not in head)
    tables = [f"MODEL_FOR_{head}_MAPPING" for head in heads]
    if not with_head:
        tables = [*tables, "MODEL_MAPPING"] if prefer_head else ["MODEL_MAPPING", *tables]
    built = [getattr(transformers, table).get(type(config), None) for table in tables]
    models: list[Any] = [k for k in named if isinstance(k, type) and issubclass(k, transformers.PreTrainedModel)]
    models = [k for k in models if isinstance(config, k.config_class or ())]  # because a config may name any class
    for kind in (*models, *(k[0] if isinstance(k, tuple) else k for k in built if k is not None)):
        if not with_head or _has_head(kind, config):
            return kind
    what = f"transformers has no language-model head for {config.model_type}" if with_head else (
        f"transformers has no model for {config.model_type}")  # fmt: skip
    raise FFNError(what, code=ExitCode.USAGE if with_head else ExitCode.ENVIRONMENT)


def _has_head(kind: Any, config: Any) -> bool:
    """Return whether a model class has an output head; False if no model can be built from this config."""
    try:
        with torch.device("meta"):
            return kind(config).get_output_embeddings() is not None
    except Exception:
        return False


def _without_head(module: Any) -> None:
    """Remove an untied head: it may take a gigabyte, and the run stops before it.

    FSMT returns its decoder's embedding as its output head; that embedding is kept.
    """
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    tied = {part for pair in (getattr(module, "all_tied_weights_keys", None) or {}).items() for part in pair}
    for name, child in module.named_modules():
        if child is head and isinstance(head, nn.Linear) and not any(key.startswith(f"{name}.") for key in tied):
            module.set_submodule(name, nn.Identity())
            return


def known_tokens(module: Any) -> int:
    """Return the number of rows of the token embedding; valid token ids are below this number."""
    try:
        return int(module.get_input_embeddings().weight.shape[0])
    except (NotImplementedError, AttributeError):
        return 2**31


def context_length(module: Any, config: Any) -> int | None:
    """Return the maximum number of tokens of a text, by config or learned positions; None if unlimited."""
    try:
        text = config.get_text_config(decoder=True)
    except ValueError:  # there are several text configs
        text = config
    limits = [limit for limit in (getattr(text, "max_position_embeddings", None),) if type(limit) is int and limit > 0]
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding) and name.endswith("embeddings.position_embeddings") and part.padding_idx:
            # RoBERTa's positions start after the padding index.
            limits.append(part.num_embeddings - part.padding_idx - 1)
    return min(limits, default=None)


_BLOCK = re.compile(r"\bblk\.(\d+)\.")


class SharedReaders:
    """The GGUF readers of one run, by path; `tensors_of` limits them to the layers of a model."""

    def __init__(self, kind: type) -> None:
        self._kind = _fast(kind)
        self._readers: dict[Path, Any] = {}

    def __call__(self, path: Any, mode: str = "r") -> Any:
        """Return the reader of a file; takes the same arguments as gguf's class."""
        file = Path(path).resolve()
        if file not in self._readers:
            self._readers[file] = reader = self._kind(file, mode)
            reader.all_tensors = reader.tensors
        return self._readers[file]

    def tensors_of(self, module: nn.Module) -> None:
        """Hide the tensors of layers that were cut: transformers dequantizes every tensor that a reader lists."""
        last = max((int(part) for name in module.state_dict() for part in name.split(".") if part.isdigit()), default=0)
        for reader in self._readers.values():
            reader.tensors = [tensor for tensor in reader.all_tensors if _block(tensor.name) <= last]


@contextmanager
def shared_reader() -> Iterator[SharedReaders]:
    """A context in which gguf builds a `GGUFReader` once per file, and a tensor-name map once per architecture."""
    import gguf

    library: Any = gguf
    if isinstance(library.GGUFReader, SharedReaders):
        yield library.GGUFReader
        return
    kind, names = library.GGUFReader, library.get_tensor_name_map
    library.GGUFReader = shared = SharedReaders(kind)
    library.get_tensor_name_map = cache(names)
    try:
        yield shared
    finally:
        library.GGUFReader, library.get_tensor_name_map = kind, names


def _fast(kind: type) -> type:
    class Reader(kind):  # type: ignore[misc]
        """A reader that slices a plain array, because a memmap runs Python code for each of a million slices."""

        @property
        def data(self) -> Any:
            return self._array

        @data.setter
        def data(self, mapped: Any) -> None:
            self._array = np.asarray(mapped)

    return Reader


def _block(name: str) -> int:
    number = _BLOCK.search(name)
    return int(number[1]) if number else 0
