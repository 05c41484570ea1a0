"""Calls a kernel as a program of its user would. `elsewhere.py` runs a copy of this file, under another name.

A function is called without any module of ffn. Standard input is a file of torch's: `kernel` is the path, `attribute`
the name in the file, `weights` by argument; `inputs` are called in turn. Other kernels than functions are built from
`block`, the pickled block. The outputs go to the path `outputs`.
"""

import importlib.util
import inspect
import io
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def _function(job: dict[str, Any]) -> Callable[[torch.Tensor], object]:
    folder, package = Path(job["kernel"]).parent, list[str]()
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        package.insert(0, folder.name)
        folder = folder.parent
    sys.path[:0] = dict.fromkeys([str(folder), str(Path(job["kernel"]).parent)])
    spec = importlib.util.spec_from_file_location(".".join([*package, Path(job["kernel"]).stem]), job["kernel"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    target, weights = getattr(module, job["attribute"]), job["weights"]
    if inspect.isfunction(target):
        names = list(inspect.signature(target).parameters.values())[1:]
        takes_all = any(one.kind is one.VAR_KEYWORD for one in names)
        given = {name: w for name, w in weights.items() if takes_all or name in {one.name for one in names}}
        position = [given.pop(one.name) for one in names if one.kind is one.POSITIONAL_ONLY and one.name in given]
        return lambda x: target(x, *position, **given)
    from ffncli.run.user.kernels import kernel_of

    choice, steps, spec_, named = pickle.loads(job["block"])
    kernel = kernel_of(choice, steps, spec_)
    params = tuple(kernel.prepare(steps, {name: weights[argument] for name, argument in named.items()}))
    compute = kernel.build(steps, job["device"], job["inputs"][0].dtype)
    return lambda x: compute(x, params)


def main() -> None:
    """Read the job, call the kernel, write the outputs."""
    job = torch.load(io.BytesIO(sys.stdin.buffer.read()), map_location="cpu", weights_only=False)
    torch.set_num_threads(job["threads"])
    job["weights"] = {name: weight.to(job["device"]) for name, weight in job["weights"].items()}
    with torch.no_grad():
        call = _function(job)
        outputs = [call(x.to(job["device"])) for x in job["inputs"]]
    torch.save([out.detach().cpu() if isinstance(out, torch.Tensor) else None for out in outputs], job["outputs"] + "_")
    os.replace(job["outputs"] + "_", job["outputs"])


if __name__ == "__main__":
    main()
