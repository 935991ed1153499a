"""The formulas of docs/scale.md have the form of what ranks do: exchanges, their bytes, and what is divided."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks import tensor_parallel as predicted

from graft.ir.nodes import calls, is_op, tensor_of
from graft.ops.ranks import ThreadRank
from rank_cases import sharded, some_tokens, together, whole_graph

LAYERS, HIDDEN, KV_HEADS = 2, 32, 2  # of tiny Llama
PAGE = Path(__file__).parents[3] / "docs" / "scale.md"


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_exchange_and_read_what_is_predicted(monkeypatch, world):
    """Two sums a layer, of a row for each token; the embedding's and the logits' beside them are left out."""
    summed, all_reduce = [], ThreadRank.all_reduce

    def counted(self, x):
        summed.append(x.nbytes)
        return all_reduce(self, x)

    monkeypatch.setattr(ThreadRank, "all_reduce", counted)
    parts = [sharded(whole_graph("llama"), rank, world)[0] for rank in range(world)]
    together(parts)
    assert summed == [some_tokens()[0].numel() * HIDDEN * 4] * world * (2 * LAYERS + 1)
    weights = [sum(p.nbytes for p in part.parameters() if p.dim() > 1) for part in (*parts, whole_graph("llama"))]
    # keys and values have weights of 2 heads of 8; 4 ranks have each of these twice
    repeated = 2 * LAYERS * HIDDEN * KV_HEADS * 8 * 4 * (world // KV_HEADS - 1)
    assert all(one * world == weights[-1] + repeated for one in weights[:-1])
    attention = next(node for node in calls(parts[0].graph) if is_op(node, torch.ops.graft.attention.default))
    assert tensor_of(attention.args[1]).shape[1] == KV_HEADS // min(world, KV_HEADS)


def test_the_page_has_the_tables_that_are_computed():
    page = PAGE.read_text()
    assert predicted.predict() in page and predicted.predict_sequence() in page


def test_an_exchange_more_costs_its_latency_and_saves_the_norms_of_other_ranks_rows():
    shape = predicted.SHAPES[0]
    few, many = (predicted.sequence(shape, 2, tokens)[0] for tokens in (1, 1_000_000))
    assert few == pytest.approx(-2 * shape.layers * predicted.LATENCY, rel=0.01)
    even = predicted.LATENCY * predicted.RATE / (4 / 2 * shape.hidden * 2)
    assert many > 0 and predicted.sequence(shape, 2, even)[0] == pytest.approx(0, abs=1e-9)
    assert 2900 < even < 3100  # as the page says
