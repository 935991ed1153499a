"""A folder's model without its numbers: what stands behind each parameter is read when it is asked for, and of what a
rank needs a part of, that part alone.

transformers makes the model out of recorded tensors (weights/recorded.py), so that its names, joined experts and ties
are those of any other load.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import Module, Parameter
from transformers import AutoModelForCausalLM, GenerationConfig

from graft.models.requests import own_code, quantizations
from graft.weights.checkpoint import read_header, read_object
from graft.weights.lazy import LazyWeights, hollow
from graft.weights.mapped import DTYPES
from graft.weights.recorded import RecordedTensor, recorded_tensors
from graft.weights.sources import WeightFile

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"


def slices_problem(folder: Path) -> str | None:
    """Why every rank has to read all of a folder, or None."""
    paths = weight_files(folder)
    if not paths:
        return "its weights are no safetensors files"
    if own_code(folder):
        return "it brings code of its own"
    if any(True for _ in quantizations(read_object(folder / "config.json"))):
        return "it is quantized, and transformers unpacks it while it loads"
    for path in paths:
        entries = read_header(path)[0]
        other = next(
            (e["dtype"] for n, e in entries.items() if n != "__metadata__" and e["dtype"] not in DTYPES), None
        )
        if other is not None:
            return f"{path.name} has tensors of {other}"
    return None


def weight_files(folder: Path) -> list[Path]:
    """Those that transformers reads: others may lie beside them."""
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    if not (folder / INDEX).is_file():
        return []
    return [folder / name for name in sorted(set(read_object(folder / INDEX)["weight_map"].values()))]


def sliced_model(
    folder: Path, config: Any, dtype: torch.dtype, device: torch.device
) -> tuple[Any, dict[str, Any], LazyWeights]:
    """The module, what transformers says of its names, and what stands behind its parameters."""
    files = [WeightFile.open(path) for path in weight_files(folder)]
    with torch.device("meta"):  # Auto classes take a folder's name alone
        kind: Any = type(AutoModelForCausalLM.from_config(config, trust_remote_code=False))
    model, info = kind.from_pretrained(
        None,
        config=config,
        state_dict=recorded_tensors(files),
        dtype=dtype,
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        trust_remote_code=False,
    )
    if (folder / GENERATION).is_file():
        model.generation_config = GenerationConfig.from_dict(read_object(folder / GENERATION))
    lazy = LazyWeights(files=tuple(files))
    put_hollow(model, lazy, device)
    return model, info, lazy


def put_hollow(model: Module, lazy: LazyWeights, device: torch.device) -> None:
    """Recorded parameters become ones of the device without numbers; a tied one stays one."""
    made: dict[int, Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = plain(parameter, lazy, device)
            module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = (buffer.numbers() if isinstance(buffer, RecordedTensor) else buffer).to(
                    device
                )


def plain(parameter: Any, lazy: LazyWeights, device: torch.device) -> Parameter:
    if not isinstance(parameter, RecordedTensor):
        return Parameter(parameter.data.to(device), requires_grad=False)
    empty = hollow(tuple(parameter.shape), parameter.dtype, device)
    lazy.put_source(empty, parameter.source)
    return Parameter(empty, requires_grad=False)
