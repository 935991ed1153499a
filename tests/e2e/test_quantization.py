"""Quantized weights on the real embedded model: what they do to its predictions, and what a defect would do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from graft.bench.quality import logits_of, quality, with_transforms
from graft.capture.decoder import capture_decoder
from graft.models.load import load_model

TEXT = Path(__file__).parents[2] / "benchmarks" / "quantization.txt"
TOKENS = 192
# ratio of the perplexities and mean KL divergence. Measured: 1.006 and 0.003, 1.010 and 0.016, 1.54 and 0.50; the
# margin is for another order of sums, which moves a ratio by less than 0.001, and for finer searches.
BOUNDS: dict[str, tuple[float, float]] = {"int8": (1.02, 0.006), "fp8": (1.03, 0.03), "int4": (1.65, 0.65)}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def original():
    """The captured model, the text, and what the model thinks of it."""
    model = load_model("smollm2-135m", dtype="float32", device="cpu")
    ids = model.tokenizer(TEXT.read_text())["input_ids"][:TOKENS]
    gm = capture_decoder(model.module)
    return gm, ids, logits_of(gm, ids, CPU)


@pytest.mark.exhaustive  # the short run has test_quantization_numbers and test_quantized_engines
@pytest.mark.parametrize("kind", BOUNDS)
def test_perplexity_stays_and_wrong_scales_would_show(original, kind):
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
