"""fuse_l2_norm: the spellings of a row divided by its length, what the op computes, and what is left alone."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from graft.ir.io.text import graph_text
from graft.ir.nodes import calls
from graft.ir.trace import export_graph
from graft.ops.cases import tolerance
from graft.passes.config import load_config
from graft.passes.pipeline import run_pipeline
from graft.passes.registry import TransformRegistry, load_all
from marks import crossed, examples

load_all()
D = 12


class Norm(nn.Module):
    def __init__(self, spelling, eps=1e-2):
        super().__init__()
        self.spelling, self.eps = spelling, eps

    def forward(self, x):
        return self.spelling(x, self.eps)


def fuse(module, *args, names=("fuse_l2_norm",)):
    gm = export_graph(module, args)
    before = graph_text(gm.graph)
    known = {n: {"enabled": n in names} for n in TransformRegistry.names()}
    report = run_pipeline(gm, load_config({"verify": "matches", "transforms": known}))
    return gm, report.transforms["fuse_l2_norm"], before


def widened(spelling):
    return lambda x, eps: spelling(x.float(), eps).type_as(x)


PLAIN = {
    "delta rule": lambda x, eps: x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + eps),
    "division": lambda x, eps: x / torch.sqrt(torch.sum(x**2, dim=-1, keepdim=True) + eps),
    "power": lambda x, eps: (x.square().sum(-1, keepdim=True) + eps).pow(-0.5) * x,
    "normalize": lambda x, eps: F.normalize(x, p=2.0, dim=-1, eps=eps),
    "normalize dim 2": lambda x, eps: F.normalize(x, dim=2, eps=eps),
    "length plus": lambda x, eps: x / (x.norm(p=2, dim=-1, keepdim=True) + eps),
    "length": lambda x, eps: x / x.norm(dim=-1, keepdim=True),
    "clamped": lambda x, eps: x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=eps),
    "clamped root": lambda x, eps: x / torch.sqrt((x * x).sum(-1, keepdim=True)).clamp_min(eps),
    "llama 4": lambda x, eps: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps),
    "eps 0": lambda x, eps: x / torch.sqrt((x * x).sum(-1, keepdim=True)),
}
SPELLINGS = PLAIN | {f"{name}, in float32": widened(spelling) for name, spelling in PLAIN.items()}


@pytest.mark.some(10)
@crossed("name", SPELLINGS, [torch.float32, torch.bfloat16])
def test_spellings_become_one_op_with_the_same_numbers(name, dtype):
    module, x = Norm(SPELLINGS[name]), torch.randn(2, 3, D, generator=torch.Generator().manual_seed(0)).to(dtype)
    if dtype is torch.bfloat16 and name == "power":
        pytest.skip("a power is a root in float32 alone")
    gm, record, _ = fuse(module, x)
    assert len(record.matches) == 1
    assert [n.target for n in calls(gm.graph)] == [torch.ops.graft.l2_norm.default]
    exact = module(x.double()) if "float32" not in name else Norm(PLAIN[name.split(", ")[0]])(x.double())
    bound = tolerance(dtype, D)
    torch.testing.assert_close(gm(x).double(), exact, rtol=bound, atol=bound)
    wrong = torch.ops.graft.l2_norm(x, 5.0, "sum").double()  # another eps is found out
    assert not torch.allclose(wrong, exact, rtol=bound, atol=bound)


@given(st.sampled_from(sorted(PLAIN)), st.floats(1e-6, 1.0), st.integers(1, 33), st.integers(0, 3), st.booleans())
@settings(max_examples=examples(15), deadline=None)
def test_any_width_rank_and_eps(name, eps, width, rank, float32):
    shape = (2, 3, 2)[3 - rank :] if rank else ()
    if name == "normalize dim 2" and rank != 2:
        name = "normalize"
    spelling = widened(PLAIN[name]) if float32 else PLAIN[name]
    module, x = Norm(spelling, eps), torch.randn((*shape, width), generator=torch.Generator().manual_seed(width))
    gm, record, _ = fuse(module, x)
    assert len(record.matches) == 1
    torch.testing.assert_close(gm(x), module(x), rtol=4e-6, atol=1e-6)


def second_reader(x, eps):
    total = (x * x).sum(-1, keepdim=True) + eps
    return x * torch.rsqrt(total), total


REFUSED = {
    "another dim": (lambda x, eps: F.normalize(x, dim=1, eps=eps), ""),
    "another power": (lambda x, eps: F.normalize(x, p=1.0, dim=-1, eps=eps), ""),
    "another row": (lambda x, eps: x.exp() * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps), ""),
    "second reader": (second_reader, "has a second reader"),
    "float64": (lambda x, eps: F.normalize(x.double(), dim=-1, eps=eps), "float64"),
    "whole tensor": (lambda x, eps: x / (x.norm() + eps), ""),
    "rows not kept": (lambda x, eps: x * torch.rsqrt((x * x).sum(-1) + eps).unsqueeze(-2), ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_unit_row_stays_byte_for_byte(name):
    spelling, reason = REFUSED[name]
    gm, record, before = fuse(Norm(spelling), torch.randn(2, D, D))
    assert record.status == "no_match" and record.reason and re.search(reason, record.reason), record.reason
    assert graph_text(gm.graph) == before


def test_a_norm_with_a_weight_is_left_to_fuse_rms_norm():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(D))

        def forward(self, x):
            return self.weight * PLAIN["llama 4"](x, 1e-5)

    gm, record, _ = fuse(Weighted(), torch.randn(2, D), names=("fuse_rms_norm", "fuse_l2_norm"))
    assert record.status == "no_match"
    assert [n.target for n in calls(gm.graph)] == [torch.ops.graft.rms_norm.default]
