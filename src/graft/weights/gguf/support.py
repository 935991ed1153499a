"""Whether a GGUF file with a sound header is one that transformers makes a decoder of; what is missing is named."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from graft.base.errors import CheckpointError, near
from graft.weights.gguf.header import Header, StringArray

TOKENS, MERGES, SCORES = (f"tokenizer.ggml.{name}" for name in ("tokens", "merges", "scores"))
# what a tokenizer cannot be made without, by tokenizer.ggml.model; sentencepiece's merges follow from its scores
NEEDED = {"gpt2": (MERGES,), "llama": (SCORES, MERGES), "t5": (SCORES,)}
LAYER = re.compile(r"blk\.(\d+)\.")


def check_supported(path: Path, header: Header) -> None:
    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise CheckpointError(f"{path} does not say its general.architecture, so nothing can be made of it")
    known = architectures()
    if plain(architecture) not in {plain(name) for name in known}:
        raise CheckpointError(
            f"{path}: the GGUF architecture {architecture!r} is not supported{near(architecture, known)}"
            " Use the model's Hugging Face folder instead"
        )
    layers = metadata.get(f"{architecture}.block_count")
    found = {match[1] for tensor in header.tensors if (match := LAYER.match(tensor.name))}
    if type(layers) is not int or not 0 < layers <= len(found):
        raise CheckpointError(
            f"{path}: {architecture}.block_count is {layers!r}, but the file has the tensors of {len(found)} layers"
        )
    check_tokenizer(path, metadata)


def plain(architecture: str) -> str:
    """llama.cpp writes gpt-oss and qwen3moe, transformers gpt_oss and qwen3_moe."""
    return architecture.replace("-", "").replace("_", "")


@cache
def architectures() -> tuple[str, ...]:
    """Those of which transformers knows the config, the tokenizer and a causal language model."""
    from transformers.integrations.ggml import GGUF_TO_FAST_CONVERTERS
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    both = set(GGUF_TO_FAST_CONVERTERS) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    named = [name for name in GGUF_SUPPORTED_ARCHITECTURES if name in both or f"{name}_text" in both]
    return (*named, *GGUF_CONFIG_ARCHS)


def check_tokenizer(path: Path, metadata: Mapping[str, Any]) -> None:
    """The vocabulary is whole: what belongs to each token is there for each token."""
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get(TOKENS)
    if not isinstance(kind, str) or not isinstance(tokens, StringArray) or not tokens.count:
        missing = TOKENS if isinstance(kind, str) else "tokenizer.ggml.model"
        raise CheckpointError(f"{path} has no {missing}, so text cannot be turned into tokens; convert it again")
    if kind in NEEDED and not any(key in metadata for key in NEEDED[kind]):
        raise CheckpointError(f"{path} has no {NEEDED[kind][0]}, which a {kind} tokenizer needs; convert it again")
    for key in (SCORES, "tokenizer.ggml.token_type"):
        if key in metadata and (type(metadata[key]) is not tuple or len(metadata[key]) != tokens.count):
            raise CheckpointError(f"{path}: {key} is not one number for each of the {tokens.count} tokens")
    for key, value in metadata.items():
        named = key.startswith("tokenizer.ggml.") and key.endswith("_token_id")
        if named and (type(value) is not int or not 0 <= value < tokens.count):
            raise CheckpointError(f"{path}: {key} is {value!r}, but the file has {tokens.count} tokens")


def check_shapes(path: Path, model: nn.Module, found: Mapping[str, tuple[int, ...]]) -> None:
    """The file's tensors have the shapes that its own metadata give the model."""
    expected: dict[str, Tensor] = dict(model.named_parameters())
    for name, shape in found.items():
        if name in expected and tuple(expected[name].shape) != tuple(shape):
            raise CheckpointError(
                f"{path}: {name} is {list(shape)}, but the file's metadata make it {list(expected[name].shape)}"
            )


def refuse_dropped(path: Path, names: list[str]) -> None:
    """Tensors that no parameter of the model stands for would be lost without a word."""
    if names:
        raise CheckpointError(
            f"{path} holds {', '.join(names[:3])}{' …' if len(names) > 3 else ''}, which transformers' model has no"
            f" place for ({len(names)} tensors would be dropped); use the model's Hugging Face folder instead"
        )
