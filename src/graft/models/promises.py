"""What config.json promises, held against the weight files and the memory before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from graft.base.device_memory import free_memory, size_text
from graft.base.errors import CheckpointError, OutOfMemory

NAMES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class SafetensorsEntry:
    """A tensor of a safetensors file, by its header."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def numbers(self) -> int:
        return prod(self.shape)


def read_context(folder: Path, config: Any) -> int:
    """How many tokens fit, or why the model cannot be run at all."""
    if config.get_text_config() is not config:
        parts = ", ".join(sorted(config.sub_configs))
        raise unsupported(folder, config, f"it is multimodal ({parts}); graft runs text decoders")
    context = getattr(config, "max_position_embeddings", None)
    if context is None:
        raise unsupported(folder, config, family_problem(config))
    if not isinstance(context, int) or isinstance(context, bool) or context < 1:
        raise CheckpointError(
            f"{folder / 'config.json'}: max_position_embeddings is {context!r}, but it is the length of the longest"
            " context, a whole number of at least 1; correct it"
        )
    return context


def unsupported(folder: Path, config: Any, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{folder}: models of type {config.model_type} are not supported: {problem}. `graft models` lists the"
        " families that are tested; use transformers for this one"
    )


def family_problem(config: Any) -> str:
    """Of a family whose configuration has no length of a context: what its models do instead."""
    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if cls is None:
        return "transformers has no causal language model for it"
    if getattr(cls, "_is_stateful", False):
        return f"{cls.__name__} keeps a recurrent state from step to step that graft does not carry"
    if not getattr(cls, "_supports_attention_backend", False):
        return (
            f"{cls.__name__} computes attention in its own way (biases by distance instead of positions) and not"
            " through Hugging Face's AttentionInterface"
        )
    return "its config has no max_position_embeddings, so the context is not known"


def check_promises(
    folder: Path, config: Any, dtype: torch.dtype, trust_remote_code: bool = False, shares: int = 1
) -> None:
    """Raises where the model of `config` is larger than the weight files, or than the memory. shares: ranks that each
    hold a part of it.

    transformers gives weights that no file has random numbers, after it has allocated them: a config of a 7B model
    over small weights would end in the system killing the process.
    """
    stored = stored_tensors(folder)
    # in *.bin a number takes a byte or more
    held = sum(each.numbers for each in stored.values()) or weight_bytes(folder)
    layers = getattr(config, "num_hidden_layers", 0)
    if stored and isinstance(layers, int) and layers > len(stored):
        raise CheckpointError(
            f"{folder}: config.json has num_hidden_layers {layers}, but the weight files have {len(stored)} tensors"
            " in all; they do not belong together"
        )
    if getattr(config, "quantization_config", None) is None:
        check_parameters(folder, config, stored, held, trust_remote_code)
    changed = sum(each.numbers for each in stored.values() if NAMES.get(each.dtype) is not dtype)
    needed, free = (
        changed * dtype.itemsize // shares,
        free_memory(CPU),
    )  # those in the file's dtype stay pages of the file
    if needed > free:
        raise OutOfMemory(
            f"the weights in {folder} take {size_text(needed)} in {str(dtype).rpartition('.')[2]}, but"
            f" {size_text(free)} of memory are free; free memory, or use a smaller dtype or model"
        )


def check_parameters(
    folder: Path, config: Any, stored: dict[str, SafetensorsEntry], held: int, trust_remote_code: bool
) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    named = dict(model.named_parameters())  # a tied one once
    promised = sum(parameter.numel() for parameter in named.values())
    if promised <= held:
        return
    other = [name for name, p in named.items() if name in stored and stored[name].shape != tuple(p.shape)]
    base = f"{model.base_model_prefix}."  # which the tensors of a folder that has the base alone go without
    missing = [name for name in named if name not in stored and name.removeprefix(base) not in stored]
    if other:
        shapes = list(stored[other[0]].shape), list(named[other[0]].shape)
        detail = f"{other[0]} is {shapes[0]}, but config.json makes it {shapes[1]}"
    else:
        detail = (
            f"there are no weights for {missing[0]} ({len(missing)} are missing)" if missing else "see the shapes"
        )
    if missing == [head_name(model)]:
        raise CheckpointError(
            f"{folder} has no weights for {missing[0]}, the output projection, so that it cannot generate; it may be"
            ' an embedder: graft serve --runner pooling, or LLM(…, runner="pooling")'
        )
    raise CheckpointError(
        f"{folder}: config.json makes a {config.model_type} model of {promised:,} parameters, but the weight files"
        f" hold {held:,} numbers: {detail}. Correct config.json, or copy the weights that belong to it"
    )


def share_head(folder: Path, config: Any, trust_remote_code: bool = False) -> tuple[str, ...]:
    """Where the folder has no weights for the output projection, which nobody reads: it gets the embedding's, so that
    none are made up, and no memory is taken. A line for the report."""
    stored = stored_tensors(folder)
    if getattr(config, "tie_word_embeddings", False) or not stored:
        return ()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    name = head_name(model)
    if name is None or name in stored:
        return ()
    config.tie_word_embeddings = True
    return (f"the folder has no {name}, which embeddings do not need",)


def head_name(model: Any) -> str | None:
    head = getattr(model.get_output_embeddings(), "weight", None)
    return next((name for name, parameter in model.named_parameters() if parameter is head), None)


def stored_tensors(folder: Path) -> dict[str, SafetensorsEntry]:
    """From the headers alone."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                part = file.get_slice(name)
                found[name] = SafetensorsEntry(tuple(part.get_shape()), part.get_dtype())
    return found


def weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.bin"))
