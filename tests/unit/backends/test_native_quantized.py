"""Quantized weights in native engines: logits beside the eager backend's, what stays float, memory, and bad input."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from conftest import tiny
from graft import LLM, SamplingParams
from graft.backends import lower
from graft.base.errors import TransformError, UsageError
from graft.bench.limits.traffic import graph_weight_bytes
from graft.bench.quality import engine_logits
from graft.models.load import load_model
from marks import short
from native_cases import needs_compiler
from quantize_cases import reasons

pytestmark = needs_compiler
IDS = [5, 9, 77, 31, 8, 3, 99, 12, 64, 2, 17]
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
# Rows of x are rounded to 8 bits in blocks of 32: half a step is 1/254 of a block's largest number, some 0.6 % of an
# activation each time. Measured 0.4 to 2.4 % of the logits; a wrong scale in one tile gives 6 % and more.
BOUND = 0.04


def engine(name: str, kind: str, **options) -> LLM:
    return LLM(
        name, dtype="float32", device="cpu", backend="native", quantize=kind, kv_cache_memory="8MiB", **options
    )


def off(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left.double() - right.double()).norm() / right.double().norm())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "kind"),
    short([("smollm2", "int8"), ("llama", "int4"), ("gpt2", "int4"), ("gemma-2", "int8")], ("gpt2", "int4")),
)
def test_logits_are_those_of_the_same_graph_in_eager(family, kind):
    """smollm2: 36 columns, and head and embedding are one weight. gpt2: addmm, whose weight lies turned."""
    llm = engine(f"tiny-{family}", kind)
    assert all(kernel.names == ("native",) for kernel in llm.report.kernels.values()), llm.report.kernels
    assert not [note for note in llm.report.notes if "eager at" in note]
    eager = lower(llm.graph_module, "eager").call
    wanted, found = engine_logits(llm, IDS, eager), engine_logits(llm, IDS)
    assert 0 < off(found, wanted) < BOUND
    weights = [p for name, p in llm.graph_module.named_parameters() if name.endswith(("_q8", "_q4"))]
    with torch.no_grad():
        for weight in weights[-3:]:  # of the last layer
            weight[:, :32] = weight[:, :32].view(torch.float16).mul(1.5).view(torch.uint8)  # scales of a block
    assert off(engine_logits(llm, IDS), wanted) > BOUND, "tiles are read where they lie, and wrong ones show"


@cache
def tied() -> LLM:
    """Head and embedding are one weight. Tests only look at it."""
    return engine("tiny-smollm2", "int4")


def test_greedy_tokens_follow_the_eager_engine():
    """Where the eager engine is sure by more than the rounding of activations, the native one agrees."""
    llm = tied()
    eager = lower(llm.graph_module, "eager").call
    (output,) = llm.generate([IDS], GREEDY)
    tokens = IDS + output.token_ids
    wanted = engine_logits(llm, tokens[:-1], eager)[len(IDS) - 1 :]
    margin = float((engine_logits(llm, tokens[:-1])[len(IDS) - 1 :] - wanted).abs().max())
    sure = 0
    for logits, token in zip(wanted, output.token_ids, strict=True):
        best, second = logits.topk(2).values
        if float(best - second) > 2 * margin:
            assert int(logits.argmax()) == token
            sure += 1
        assert float(best - logits[token]) <= 2 * margin
    assert sure >= 4


def test_head_and_embedding_read_the_same_rows():
    llm = tied()
    names = dict(llm.graph_module.named_parameters())
    tables = [name for name in names if "embed" in name or "lm_head" in name]
    assert [name.rpartition("_")[2] for name in tables if names[name].numel()] == ["q8"], "one table, packed"
    calls = [str(node.target) for node in llm.graph_module.graph.nodes]
    assert calls.count("graft.packed_embedding.default") == 1
    assert calls.count("aten.embedding.default") == 2, "cosines and sines alone"
    packed = sum(p.nbytes for p in llm.graph_module.parameters())
    held = {id(t): t.nbytes for region in regions(llm) for t in region.weights if t.dtype is torch.uint8}
    assert 0 < sum(held.values()) <= packed
    own = {p.data_ptr() for p in llm.graph_module.parameters()}
    assert all(t.data_ptr() in own for r in regions(llm) for t in r.weights if t.dtype is torch.uint8), "no copies"
    assert all(p.is_meta for p in llm.model.module.parameters() if p.dim() == 2), "the module gave its weights up"
    with pytest.raises(UsageError, match="freed when"):
        llm.model.module(torch.tensor([[1, 2]]))
    assert sum(held.values()) <= (graph_weight_bytes(llm.graph_module, 1) or 0) < 1.1 * sum(held.values())


def regions(llm: LLM) -> list:
    return [n.target for n in llm.engine.graph.graph.nodes if type(n.target).__name__ == "RegionCall"]


@pytest.mark.exhaustive
def test_the_callers_module_keeps_its_weights():
    model = load_model("tiny-smollm2", dtype="float32", device="cpu")
    before = model.module(torch.tensor([IDS])).logits
    llm = LLM(model, backend="native", quantize="int8", kv_cache_memory="8MiB")
    assert torch.equal(model.module(torch.tensor([IDS])).logits, before)
    assert any("keeps its own weights" in note for note in llm.report.notes)
    assert off(engine_logits(llm, IDS), before[0]) < BOUND


@pytest.mark.exhaustive
def test_experts_go_into_tiles_of_their_own():
    """Their logits are held in test_quantized_experts.py."""
    llm = engine("tiny-mixtral", "int8")
    record = llm.report.transforms["quantize_linear"]
    assert record.matches and not reasons(record)
    assert [str(n.target) for n in llm.graph_module.graph.nodes].count("graft.moe_experts.default") == 2
    assert all(kernel.names == ("native",) for kernel in llm.report.kernels.values()), llm.report.kernels
    assert llm.generate([IDS], GREEDY)[0].finish_reason == "length"


@pytest.mark.exhaustive
def test_head_none_and_skip_leave_weights():
    skip = {"transforms": {"quantize_linear": {"head": "none", "skip": ["o_proj"]}}}
    llm = engine("tiny-smollm2", "int8", config=skip)
    names = [name for name, p in llm.graph_module.named_parameters() if name.endswith("_q8")]
    assert names and not [name for name in names if "o_proj" in name or "embed" in name or "lm_head" in name]
    left = reasons(llm.report.transforms["quantize_linear"])
    assert "'lm_head'" in left and "'o_proj'" in left


@pytest.mark.exhaustive
def test_numbers_that_are_none_and_formats_that_are_not_there():
    model = load_model("tiny-llama", dtype="float32", device="cpu")
    with torch.no_grad():
        model.module.model.layers[1].mlp.down_proj.weight[3, 4] = float("nan")
    with pytest.raises(TransformError, match=r"down_proj\.weight holds NaN"):
        LLM(model, backend="native", quantize="int4")
    with pytest.raises(TransformError, match="no fp8; use int8 or int4"):
        LLM(tiny("llama"), backend="native", quantize="fp8")
    with pytest.raises(TransformError, match="format file is for backend='native'"):
        LLM(tiny("llama"), backend="eager", quantize="file")
    with pytest.raises(UsageError, match=r"unknown format 'int5'.*none"):
        LLM("tiny-llama", backend="native", quantize="int5")
