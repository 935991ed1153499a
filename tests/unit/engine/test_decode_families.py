"""The decode fusions on every family: how often they match, and that the tokens stay the same."""

from __future__ import annotations

import pytest
import torch
import yaml

import graft
from conftest import FAMILIES, tiny
from decode_cases import DECODE, forced
from graft.ir.nodes import is_op, output_node, placeholders
from graft.models.registry import COMMON, FOLDER, families
from marks import short

NEW = 6
LENGTHS = (1, 5, 13, 30)


def prompts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 128, (n,), generator=generator).tolist() for n in LENGTHS]


def tokens(llm):
    """Greedy, a mixed batch: prompts of several lengths that end at different steps."""
    params = [graft.SamplingParams(max_tokens=NEW - i, ignore_eos=True) for i in range(len(LENGTHS))]
    return [output.token_ids for output in llm.generate(prompts(), params)]


def check_rows(gm):
    """The last sum, then the rows that are sampled from, then their norm and the output projection."""
    index = next(node for node in placeholders(gm.graph) if node.name == "logits_indices")
    (rows,) = index.users
    assert is_op(rows, torch.ops.aten.index_select.default) and is_op(rows.args[0], torch.ops.aten.add.Tensor)
    (norm,) = rows.users
    assert is_op(norm, torch.ops.graft.rms_norm.default, torch.ops.graft.layer_norm.default)
    (linear,) = norm.users
    assert is_op(linear, torch.ops.aten.linear.default)
    (logits,) = output_node(gm.graph).args[0]
    assert str(logits.meta["val"].shape[1]) == str(norm.meta["val"].shape[1]) == str(index.meta["val"].shape[0])


@pytest.mark.parametrize("family", short(FAMILIES, "llama"))  # the matches of others: test_golden_graphs.py
def test_counts_and_greedy_tokens(family):
    model = tiny(family)
    fused, plain = (graft.LLM(model, config=config, backend="eager") for config in (forced(), None))
    expected = model.family.expected_matches(model.layers, gpu=True)
    records = fused.report.transforms
    assert {n: len(records[n].matches) for n in DECODE} == {n: expected[n] for n in DECODE}
    assert all(r.matches or r.reason or r.status == "disabled" for r in (records[name] for name in DECODE))
    assert {plain.report.transforms[name].status for name in DECODE} <= {"skipped", "disabled"}
    check_rows(plain.graph_module)
    assert tokens(fused) == tokens(plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_does_not_match_on_a_gpu_has_its_reason(family):
    """In the family's own file where others say that it is skipped on a CPU, which is no reason on a GPU."""
    common = yaml.safe_load((FOLDER / COMMON).read_text())["absent"]
    known = families()[family]
    assert known.absent["fuse_gated_mlp"] == common["fuse_gated_mlp"], "without fp8 weights there is none anywhere"
    for name in set(DECODE) - {"fuse_gated_mlp"}:
        counted, own = name in known.expect_gpu, known.absent[name] != common[name]
        assert not (counted and own), name
        if "on a CPU" in common[name] or "for a GPU" in common[name]:
            assert counted or own, name
