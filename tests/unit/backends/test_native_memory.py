"""Weights stand in memory once: where the engine loaded the model, packed ones are freed in their old form."""

from __future__ import annotations

import pytest
import torch

from graft import LLM, SamplingParams
from graft.backends.native.call import RegionCall
from graft.base.errors import UsageError
from marks import short
from native_cases import needs_compiler

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
pytestmark = needs_compiler


def made(family: str, **options) -> LLM:
    return LLM(
        f"tiny-{family}", dtype="float32", device="cpu", backend="native", kv_cache_memory="8MiB", **options
    )  # fmt: skip


def held(llm: LLM) -> int:
    """Bytes of all that module, graph and region keep."""
    regions = [node.target for node in llm.engine.graph.graph.nodes if isinstance(node.target, RegionCall)]
    packed = [weight for region in regions for weight in region.weights]
    tensors = [*llm.model.module.parameters(), *llm.graph_module.parameters(), *llm.graph_module.buffers(), *packed]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if not t.is_meta}.values()
    )


@pytest.mark.parametrize("family", short(["llama", "gpt2", "qwen3-moe"], "llama"))
def test_packed_weights_are_freed(family):
    llm, both = made(family), made(family, keep_weights=True)
    own = sum(parameter.nbytes for parameter in both.model.module.parameters())
    tables = sum(p.nbytes for name, p in both.graph_module.named_parameters() if name.endswith("_table"))
    bound = 1.15 * own + tables  # tiles pad rows to 16 and columns to 4; a tied head is the embedding's table, too
    assert held(llm) <= bound < held(both)
    assert any("the module's own were freed" in note for note in llm.report.notes)
    assert not any("own were freed" in note for note in both.report.notes)
    first, second = (engine.generate([[5, 6, 7]], GREEDY)[0].token_ids for engine in (llm, both))
    assert first == second and llm.engine.manager.root == both.engine.manager.root
    with pytest.raises(UsageError, match=r"quantized or packed.*keep_weights=True"):
        llm.model.module(torch.tensor([[1, 2]]))
    assert both.model.module(torch.tensor([[1, 2]])).logits.isfinite().all()


@pytest.mark.exhaustive
def test_what_an_eager_node_reads_stays():
    llm = made("llama", config={"kernels": {"fused_linear": "reference"}})
    assert len(llm.generate([[5, 6, 7]], GREEDY)[0].token_ids) == 6
    assert not any("own were freed" in note for note in llm.report.notes)


@pytest.mark.exhaustive
def test_a_tied_table_is_not_packed_where_the_head_is_eager():
    llm = made("smollm2", config={"kernels": {"fused_linear": "reference"}})
    assert llm.model.module.config.tie_word_embeddings
    regions = [node.target for node in llm.engine.graph.graph.nodes if isinstance(node.target, RegionCall)]
    forms = {weight.form for region in regions for weight in region.program.weights}
    assert regions and forms <= {"as_is", "float32"}
