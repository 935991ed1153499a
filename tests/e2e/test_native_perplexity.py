"""The embedded model in the native backend, its weights as the file has them and in 8 bits: predictions of a text."""

from __future__ import annotations

import shutil

import pytest
import torch

from graft import LLM, SamplingParams
from graft.backends import lower
from graft.backends.native.compiler import COMPILERS
from graft.bench.evaluate import shipped_text
from graft.bench.quality import engine_logits, quality
from graft.models.load import load_model

pytestmark = [
    pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C++ compiler"),
    pytest.mark.exhaustive,  # the short run has test_gguf_blocks and test_native_quantized
]
TOKENS = 512
MOST = 1.01  # times the perplexity of the same weights in eager float32; measured: 1.0059 (Q4_1 file), 1.0084 (int8)


@pytest.fixture(scope="module")
def text():
    model = load_model("smollm2-135m", device="cpu", in_blocks=True)
    ids = model.tokenizer(shipped_text())["input_ids"][:TOKENS]
    assert len(ids) == TOKENS
    assert model.floats is not None
    with torch.no_grad():
        return ids, model.floats()(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("kind", [None, "int8"])
def test_perplexity_is_that_of_the_dequantised_model(text, kind):
    ids, dequantised = text
    llm = LLM("smollm2-135m", device="cpu", backend="native", quantize=kind, kv_cache_memory="64MiB")
    if kind is not None:
        dequantised = engine_logits(llm, ids, lower(llm.graph_module, "eager").call)
    wanted = quality(dequantised, ids).perplexity
    found = quality(engine_logits(llm, ids), ids, dequantised)
    assert found.perplexity < MOST * wanted and found.divergence < 0.005, found
    (output,) = llm.generate(["The capital of France is"], SamplingParams(max_tokens=4))
    assert output.text.startswith(" Paris")
    spoil(llm)
    wrong = quality(engine_logits(llm, ids), ids, dequantised)
    assert wrong.perplexity > MOST * wanted and wrong.divergence > 0.005, wrong


@torch.no_grad()
def spoil(llm: LLM) -> None:
    """In the first layer, every row of a tile has the scale of the next."""
    for name, weight in llm.graph_module.named_parameters():
        if ".layers.0." in name and name.endswith(("_q8", "_q4")):
            size = 544 if name.endswith("_q8") else 320
            blocks = weight.view(len(weight), -1, size)
            blocks[..., :32] = blocks[..., :32].roll(2, -1)


def test_the_files_own_blocks_are_the_default_and_stand_in_memory_once():
    llm = LLM("smollm2-135m", device="cpu", backend="native", kv_cache_memory="16MiB")
    assert llm.quantized is not None and llm.quantized.format == "Q8_0+Q4_1"
    packed = sum(p.nbytes for name, p in llm.graph_module.named_parameters() if name.endswith(("_q8", "_q4")))
    assert 90e6 < packed < 100e6
    regions = [n.target for n in llm.engine.graph.graph.nodes if type(n.target).__name__ == "RegionCall"]
    everything = [*llm.graph_module.parameters(), *llm.graph_module.buffers(), *llm.model.module.buffers()]
    everything += [t for region in regions for t in region.weights]
    everything += [p for p in llm.model.module.parameters() if not p.is_meta]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in everything}
    assert sum(storages.values()) < 1.15 * packed
