"""The matcher: what must match, what must not, and what it says about the difference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import graft.ops  # noqa: F401
from graft.base.errors import PatternError
from graft.ir.io.text import graph_text
from graft.ir.patterns.arguments import example_specs
from graft.ir.patterns.match import Finder
from graft.ir.trace import export_graph

SHAPES = {"x": "b s d", "weight": "d"}


def llama(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    h = x.to(torch.float32)
    return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


class Norm(nn.Module):
    def __init__(self, body, d=8, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d).to(dtype))
        self.body = body

    def forward(self, x):
        return self.body(x, self.weight)


def rms(x, weight, eps=1e-5, dim=-1):
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(dim, keepdim=True) + eps)
    return weight * h.to(x.dtype)


def find(body, x=None, dtype=torch.float32, dynamic=False):
    x = torch.randn(2, 3, 8).to(dtype) if x is None else x
    shapes = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},) if dynamic else None
    gm = export_graph(Norm(body, x.shape[-1], dtype), (x,), dynamic_shapes=shapes)
    before = graph_text(gm.graph)
    matches, misses = Finder(llama, SHAPES).find(gm.graph)
    assert graph_text(gm.graph) == before, "finding changes nothing"
    return matches, misses


MUST_MATCH = {
    "as written": lambda x, w: rms(x, w),
    "another eps": lambda x, w: rms(x, w, eps=3e-4),
    "a tiny eps": lambda x, w: rms(x, w, eps=1e-30),
    "weight on the right": lambda x, w: (
        ((h := x.to(torch.float32)) * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * w
    ),
    "factors the other way round": lambda x, w: (
        w * (torch.rsqrt((h := x.to(torch.float32)).pow(2).mean(-1, keepdim=True) + 1e-5) * h).to(x.dtype)
    ),
    "eps on the left": lambda x, w: (
        w * ((h := x.to(torch.float32)) * torch.rsqrt(1e-5 + h.pow(2).mean(-1, keepdim=True))).to(x.dtype)
    ),
    "x * x for pow": lambda x, w: (
        w * ((h := x.to(torch.float32)) * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
    ),
    "positive dim": lambda x, w: rms(x, w, dim=x.dim() - 1),
    "x read again": lambda x, w: rms(x, w) + x,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MUST_MATCH)
def test_matches_any_spelling_and_dtype(name, dtype):
    matches, _ = find(MUST_MATCH[name], dtype=dtype)
    assert len(matches) == 1
    assert matches[0].literals.keys() == {"eps"}


@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 8), (2, 4, 3, 8)])
def test_matches_any_rank(shape):
    matches, _ = find(lambda x, w: rms(x, w), torch.randn(shape))
    assert len(matches) == 1


def test_matches_dynamic_shapes():
    matches, _ = find(lambda x, w: rms(x, w), dynamic=True)
    assert len(matches) == 1


def test_literal_is_captured():
    matches, _ = find(lambda x, w: rms(x, w, eps=0.125))
    assert matches[0].literals == {"eps": 0.125}


def inner_read(x, w):
    h = x.to(torch.float32)
    scale = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
    return w * (h * scale).to(x.dtype) + scale


MUST_NOT_MATCH = {
    "an inner value is read from outside": (inner_read, "second reader"),
    "another dim": (lambda x, w: rms(x.transpose(-1, -2), w[:3], dim=-2).transpose(-1, -2), "expected the value"),
    "pow 3": (
        lambda x, w: w * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-5)),
        "expected the value 2, found 3",
    ),
    "eps is a tensor": (
        lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + w[0])),
        "not a number",
    ),
    "another x in the product": (
        lambda x, w: w * (x.exp() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),
        "again",
    ),
    "no keepdim": (
        lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1) + 1e-5).unsqueeze(-1)),
        None,  # too little fits to be called near
    ),
    "sqrt and division": (
        lambda x, w: w * (x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),
        None,
    ),
}


@pytest.mark.parametrize("name", MUST_NOT_MATCH)
def test_refuses_and_says_why(name):
    body, reason = MUST_NOT_MATCH[name]
    matches, misses = find(body)
    assert matches == []
    if reason is not None:
        assert any(reason in miss.reason for miss in misses), [m.reason for m in misses]
        assert all(miss.node.startswith("%") and miss.matched <= miss.size for miss in misses)


def test_inner_value_that_is_also_an_output_is_refused():
    def body(x, w):
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return w * h, h

    matches, misses = find(body)
    assert matches == [] and "second reader" in misses[0].reason


def test_extra_readers_are_allowed_where_the_finder_says_so():
    gm = export_graph(Norm(inner_read), (torch.randn(2, 3, 8),))
    matches, _ = Finder(llama, SHAPES, allow_readers=True).find(gm.graph)
    assert len(matches) == 1


def test_a_write_between_the_nodes_is_refused():
    def body(x, w):
        h = x.clone()
        scale = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
        h.add_(1)
        return w * (h * scale)

    matches, misses = find(body)
    assert matches == []
    assert any("written in place" in m.reason or "again" in m.reason for m in misses), misses


def test_a_cast_that_changes_something_does_not_match_as_nothing():
    """A pattern without casts must not swallow a real one."""

    def pattern(x: Tensor) -> Tensor:
        return torch.relu(torch.exp(x))

    def model(x, w):
        return torch.relu(torch.exp(x).to(torch.bfloat16)).to(torch.float32) + w

    gm = export_graph(Norm(model), (torch.randn(2, 3, 8),))
    matches, _ = Finder(pattern, {"x": "b d"}).find(gm.graph)
    assert matches == []


def test_sizes_in_a_pattern_are_confirmed():
    """Half of the head must be half of the head."""

    def pattern(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), -1)

    def wrong(x, w):
        return torch.cat((-x[..., 3:], x[..., :3]), -1) * w

    def right(x, w):
        return torch.cat((-x[..., 4:], x[..., :4]), -1) * w

    found = {}
    for name, body in (("wrong", wrong), ("right", right)):
        gm = export_graph(Norm(body), (torch.randn(2, 3, 8),))
        found[name] = Finder(pattern, {"x": "b s d"}).find(gm.graph)
    assert len(found["right"][0]) == 1
    assert found["wrong"][0] == [] and found["wrong"][1], "the near miss is told"


def test_every_match_of_a_deep_graph_and_flat_cost_per_node(monkeypatch):
    """The number of comparisons grows with the graph, not faster."""
    from graft.ir.patterns import match as match_module

    counts = {}
    real = match_module.Attempt.unify
    for layers in (8, 32):

        def body(x, w, layers=layers):
            for _ in range(layers):
                x = x + rms(x, w)
            return x

        gm = export_graph(Norm(body), (torch.randn(2, 3, 8),))
        calls = 0

        def counting(self, wanted, found):
            nonlocal calls
            calls += 1
            return real(self, wanted, found)

        monkeypatch.setattr(match_module.Attempt, "unify", counting)
        matches, _ = Finder(llama, SHAPES).find(gm.graph)
        monkeypatch.setattr(match_module.Attempt, "unify", real)
        assert len(matches) == layers
        counts[layers] = calls / len(gm.graph.nodes)
    assert counts[32] <= 1.1 * counts[8]


def test_a_pattern_that_returns_its_input_is_an_error():
    def pattern(x: Tensor) -> Tensor:
        return x

    gm = export_graph(Norm(lambda x, w: rms(x, w)), (torch.randn(2, 3, 8),))
    with pytest.raises(PatternError, match="results of operations"):
        Finder(pattern, {"x": "b d"}).find(gm.graph)


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        (("b", "s"), "write it as a text of dims"),
        ("b s ?", r"'\?' is no dim"),
        ("b,s,d", "'b,s,d' is no dim"),
        ("b s dim", "'dim' is no dim"),
        ("b s *x", r"'\*x' is no dim"),
        ("b s d : floaty", "'floaty' is no dtype"),
    ],
)
def test_a_shape_that_is_not_understood_is_named(shape, told):
    with pytest.raises(PatternError, match=f"pattern llama: the shape of x is .*{told}"):
        example_specs(llama, {"x": shape, "weight": "d"}, 8)
    assert example_specs(llama, {"x": "2*b s r+6 : float32", "weight": "1"}, 8)["x"].dtype is torch.float32


def test_a_pattern_with_wrong_shapes_is_an_error():
    gm = export_graph(Norm(lambda x, w: rms(x, w)), (torch.randn(2, 3, 8),))
    with pytest.raises(PatternError, match="shapes are given for"):
        Finder(llama, {"x": "b s d"}).find(gm.graph)
