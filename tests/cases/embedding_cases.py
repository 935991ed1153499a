"""Folders of tiny embedders, as sentence-transformers writes them, and what Hugging Face's own classes say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

LAST, MEAN = {"pooling_mode_lasttoken": True}, {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}
STEPS = ("Transformer", "Pooling", "Normalize")
PLACES = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}


def embedder(
    folder: Path,
    kind: str = "qwen3",
    *,
    head: bool = False,
    pooling: dict[str, Any] | None = None,
    steps: tuple[str, ...] = STEPS,
    **settings: Any,
) -> Path:
    """head: with an output projection, as a decoder that generates is saved; without, its base alone."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from serve_cases import tokenizer_json
    from tiny_decoders import tiny_decoder

    model = tiny_decoder(kind, vocab_size=300, max_position_embeddings=128, **settings)
    for parameter in model.parameters():  # of a size at which a wrong row cannot pass for the right one
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    assert type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    (model if head else model.base_model).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer_json())).save_pretrained(folder)
    if pooling is not None:
        types = [{"idx": i, "name": str(i), "path": PLACES.get(s, s), "type": f"sentence_transformers.models.{s}"}
                 for i, s in enumerate(steps)]  # fmt: skip
        (folder / "modules.json").write_text(json.dumps(types))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **pooling}))
    return folder


def hidden_states(folder: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    """[tokens, d] of each, by the base model in float32; its `sdpa` leaves out Gemma 2's soft cap."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return [model(torch.tensor([ids])).last_hidden_state[0] for ids in prompts]


def unit(vector: torch.Tensor) -> torch.Tensor:
    return vector / vector.norm()
