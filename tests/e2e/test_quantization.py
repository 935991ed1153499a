"""Quantized weights on the real embedded model: what they do to its predictions, and what a defect would do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from graft.capture.decoder import capture_decoder
from graft.models.load import load_model
from graft.workbench.quality import logits_of, quality, with_transforms

TEXT = Path(__file__).parents[2] / "benchmarks" / "quantization.txt"
TOKENS = 192
BOUNDS: dict[str, tuple[float, float]] = {"int8": (1.01, 0.01), "fp8": (1.05, 0.05), "int4": (1.6, 0.8)}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def original():
    """The captured model, the text, and what the model thinks of it."""
    model = load_model("smollm2-135m", dtype="float32", device="cpu")
    ids = model.tokenizer(TEXT.read_text())["input_ids"][:TOKENS]
    gm = capture_decoder(model.module)
    return gm, ids, logits_of(gm, ids, CPU)


@pytest.mark.parametrize("kind", BOUNDS)
def test_perplexity_stays_and_wrong_scales_would_show_r21(original, kind):
    gm, ids, logits = original
    before = quality(logits, ids).perplexity
    made = with_transforms(gm, {"quantize_linear": {"format": kind}})
    ratio, divergence = BOUNDS[kind]
    found = quality(logits_of(made, ids, CPU), ids, logits)
    assert found.perplexity < ratio * before and found.divergence < divergence, found
    shift_scales(made)
    wrong = quality(logits_of(made, ids, CPU), ids, logits)
    assert wrong.perplexity > ratio * before and wrong.divergence > divergence, wrong


@torch.no_grad()
def shift_scales(gm) -> None:
    """Of the first layer alone: every scale goes to the next group of its row, or to the next row."""
    for name, parameter in gm.named_parameters():
        if name.endswith("_scale") and ".layers.0." in name:
            parameter.copy_(parameter.roll(1, -1))
