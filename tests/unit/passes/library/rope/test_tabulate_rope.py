"""Cosines and sines from tables: the same bits, what is computed for each position by itself, and what is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

from decode_cases import only, targets
from graft.base.errors import TransformError
from graft.ir.io.text import graph_text
from graft.ir.nodes import calls, module_path
from graft.ir.trace import export_graph
from graft.passes.base import Context
from graft.passes.library.rope.positions import Computed
from graft.passes.library.rope.tabulate_rope import TabulateRope
from graft.passes.pipeline import run_pipeline

H, R = 2, 8  # heads, size of a head
CONTEXT = 64
NAME = "tabulate_rope"


def llama(inv, positions, dtype):
    """As Hugging Face spells it: [b, s] → [b, s, r]."""
    frequencies = (inv[None, :, None].expand(positions.shape[0], -1, 1) @ positions[:, None].float()).transpose(1, 2)
    angles = torch.cat((frequencies, frequencies), -1)
    return (angles.cos() * 1.5).to(dtype), (angles.sin() * 1.5).to(dtype)


def product(inv, positions, dtype):
    """Without a matrix product, halves stacked and flattened."""
    angles = positions[..., None].to(inv.dtype) * inv
    angles = torch.stack((angles, angles), -2).flatten(-2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


class Rotary(nn.Module):
    """graft.rope of queries [b, h, s, r] by angles that `function` computes."""

    def __init__(self, function=llama, dtype=torch.float32, interleaved=False):
        super().__init__()
        self.register_buffer("inv_freq", 1 / 10 ** (torch.arange(0, R, 2) / R))
        self.function, self.dtype, self.interleaved = function, dtype, interleaved

    def forward(self, q, position_ids):
        cos, sin = self.function(self.inv_freq, position_ids, self.dtype)
        cos, sin = (angle.unsqueeze(1) if angle.dim() == 3 else angle for angle in (cos, sin))
        return torch.ops.graft.rope(q, cos, sin, self.interleaved)


def inputs(b=2, s=5, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn((b, H, s, R), generator=generator).to(dtype)
    return q, torch.randint(0, CONTEXT, (b, s), generator=generator)


def captured(module, dtype=torch.float32):
    b, s = Dim("b"), Dim("s")
    return export_graph(module, inputs(dtype=dtype), dynamic_shapes=({0: b, 2: s}, {0: b, 1: s}))


def tabulate(module, dtype=torch.float32, context=CONTEXT, options=None):
    gm = captured(module, dtype)
    config = only(NAME, options={NAME: options or {}})
    report = run_pipeline(gm, config, Context(route="decoder", context_length=context))
    return gm, report.transforms[NAME]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [llama, product])
def test_the_same_bits_from_two_tables(function, dtype):
    module = Rotary(function, dtype)
    gm, record = tabulate(module, dtype)
    assert record.status == "applied", record.reason
    assert [t for t in targets(gm) if "unsqueeze" not in t] == ["aten.embedding", "aten.embedding", "graft.rope"]
    for seed, (b, s) in enumerate([(1, 1), (2, 5), (1, 33)]):
        args = inputs(b, s, dtype, seed)
        assert torch.equal(gm(*args), module(*args))
    (match,) = record.matches
    size = 2 * CONTEXT * R * dtype.itemsize / 1e6
    assert (
        match.pattern == f"2 tables of [{CONTEXT}, {R}] {dtype}, {size:.1f} MB"
        and match.numeric_check.error <= match.numeric_check.limit
    )


class SpeltOut(Rotary):
    """The rotation as its model has it."""

    def forward(self, q, position_ids):
        cos, sin = (angle.unsqueeze(1) for angle in self.function(self.inv_freq, position_ids, self.dtype))
        return q * cos + torch.cat((-q[..., R // 2 :], q[..., : R // 2]), -1) * sin


def test_angles_of_rotations_that_are_no_op():
    """`fuse_rope` is off, or an author's own takes its place."""
    module = SpeltOut()
    gm, record = tabulate(module)
    assert record.status == "applied" and len(record.matches) == 1
    assert targets(gm).count("aten.embedding") == 2 and not {"aten.cos", "aten.sin"} & set(targets(gm))
    for seed, (b, s) in enumerate([(1, 1), (2, 5), (1, 33)]):
        args = inputs(b, s, seed=seed)
        assert torch.equal(gm(*args), module(*args))


def test_other_cosines_are_left_alone():
    class Waves(nn.Module):
        """Of what the model computes, and a cosine without a sine."""

        def forward(self, q, position_ids):
            return q.cos() * q.sin() + position_ids[:, None, :, None].float().cos()

    gm, record = tabulate(Waves())
    assert not record.matches and targets(gm).count("aten.cos") == 2


GOLDEN = """\
%cos_table = self.rope.cos_table : f32[64, 8]
%embedding_default = aten.embedding(%cos_table, %position_ids) : f32[b, s, 8]
%sin_table = self.rope.sin_table : f32[64, 8]
%embedding_default_1 = aten.embedding(%sin_table, %position_ids) : f32[b, s, 8]
%unsqueeze_a = aten.unsqueeze(%embedding_default, -3) : f32[b, 1, s, 8]
%unsqueeze_b = aten.unsqueeze(%embedding_default_1, -3) : f32[b, 1, s, 8]
"""


def test_the_graph_and_its_nodes():
    gm, _ = tabulate(Rotary())
    sizes = [str(size) for size in next(n for n in gm.graph.nodes if n.name == "position_ids").meta["val"].shape]
    views = [node.name for node in calls(gm.graph) if "unsqueeze" in node.name]
    text = graph_text(gm.graph)
    renamed = [
        (sizes[0], "b"),
        (sizes[1], "s"),
        ("%rope_", "%"),
        *zip(views, ("unsqueeze_a", "unsqueeze_b"), strict=True),
    ]
    for old, new in renamed:
        text = text.replace(old, new)
    lines = [line.partition("    #")[0] for line in text.splitlines() if "table" in line or "unsqueeze" in line]
    assert "".join(f"{line}\n" for line in lines if "graft" not in line) == GOLDEN
    for node in gm.graph.nodes:
        if node.meta.get("made_by") == NAME:
            assert node.meta["val"].shape[-1] == R and module_path(node) == "" and "stack_trace" in node.meta


def test_a_dim_for_heads_inside_the_computation():
    """GLM-4 puts the dim in first and doubles the angles after it."""

    def early(inv, positions, dtype):
        cos, sin = (angle.unsqueeze(1) for angle in llama(inv, positions, dtype))
        return cos[..., : R // 2].repeat_interleave(2, -1), sin[..., : R // 2].repeat_interleave(2, -1)

    module = Rotary(early, interleaved=True)
    gm, record = tabulate(module)
    assert len(record.matches) == 1, record.reason
    args = inputs(1, 9, seed=4)
    assert torch.equal(gm(*args), module(*args))


def test_two_embeddings_are_four_tables():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.near, self.far = Rotary(), Rotary()
            self.far.inv_freq = self.far.inv_freq / 8

        def forward(self, q, position_ids):
            return self.near(q, position_ids) + self.far(q, position_ids) + self.near(q.exp(), position_ids)

    module = Two()
    gm, record = tabulate(module)
    names = sorted(name for name, _ in gm.named_parameters())
    assert len(record.matches) == 2
    assert names == ["far.cos_table", "far.sin_table", "near.cos_table", "near.sin_table"]
    args = inputs(1, 9, seed=4)
    assert torch.equal(gm(*args), module(*args))


def angles_of(change):
    """Angles as usual, of positions [b, s] that `change` computed from them."""
    return lambda inv, positions, dtype: llama(inv, change(positions), dtype)


def written(inv, positions, dtype):
    result = llama(inv, positions, dtype)
    inv.mul_(0.5)
    return result


MIXED = {
    "cumsum": angles_of(lambda p: p.cumsum(1)),
    "aten.flip": angles_of(lambda p: p.flip(1)),
    "aten.max": angles_of(lambda p: p - p.max()),
    "along a dim of the positions": angles_of(lambda p: p - p[:, :1]),
    "%arange": angles_of(lambda p: p + torch.arange(p.shape[1])),
    "depends on the number of tokens": lambda inv, p, dtype: tuple(a * p.shape[1] for a in llama(inv, p, dtype)),
    "a value for each slot of the batch": lambda inv, p, dtype: llama(inv, p + inv[:1].expand(p.shape[1]), dtype),
    "not from positions alone": lambda inv, p, dtype: llama(
        inv, torch.arange(p.shape[1])[None].expand(p.shape), dtype
    ),
    "is written by the graph": written,
}


@pytest.mark.some(4)
@pytest.mark.parametrize("reason", MIXED)
def test_what_is_not_of_each_position_by_itself_is_computed_as_before(reason):
    module = Rotary(MIXED[reason])
    before = graph_text(captured(module).graph)
    gm, record = tabulate(module)
    told = [record.reason, *(miss.reason for miss in record.near_misses)]
    assert record.status == "no_match" and any(reason in text for text in told), told
    assert graph_text(gm.graph) == before


def test_angles_that_depend_on_another_input():
    class Scaled(Rotary):
        def forward(self, q, position_ids):
            cos, sin = llama(self.inv_freq * q.mean(), position_ids, self.dtype)
            return torch.ops.graft.rope(q, cos.unsqueeze(1), sin.unsqueeze(1))

    _, record = tabulate(Scaled())
    assert "is computed from %q and %position_ids" in record.reason


def test_where_no_table_can_be_it_is_skipped_with_the_reason():
    gm = captured(Rotary())
    before = graph_text(gm.graph)
    for config, context, reason in [
        (only(NAME), Context(route="decoder"), "the length of the context is not known"),
        (only(NAME), Context(route="module", context_length=9), "not run by graft's engine"),
        (only(NAME, options={NAME: {"devices": ["cuda"]}}), Context(route="decoder", context_length=9), "on cpu"),
    ]:
        record = run_pipeline(gm, config, context).transforms[NAME]
        assert record.status == "skipped" and reason in record.reason
    _, record = tabulate(Rotary(), options={"limit_mib": 0})
    assert "is more than 0 MiB" in record.reason
    assert graph_text(gm.graph) == before

    class Plain(nn.Module):
        def forward(self, q, position_ids):
            return q * position_ids[:, None, :, None]

    assert tabulate(Plain())[1].reason == "the graph has no graft::rope"


def test_a_graph_without_weights_is_told_so():
    module = Rotary().to("meta")
    b, s = Dim("b"), Dim("s")
    args = (torch.empty(2, H, 5, R, device="meta"), torch.zeros(2, 5, dtype=torch.int64, device="meta"))
    gm = export_graph(module, args, dynamic_shapes=({0: b, 2: s}, {0: b, 1: s}))
    config = only(NAME, options={NAME: {"devices": ["meta"]}})
    record = run_pipeline(gm, config, Context(route="decoder", context_length=9)).transforms[NAME]
    assert record.status == "no_match" and "on the meta device there are no values" in record.reason


def test_a_table_that_differs_in_one_bit_is_refused(monkeypatch):
    right = Computed.at
    monkeypatch.setattr(
        Computed, "at", lambda self, gm, p: right(self, gm, p) * (1 + 2**-22 if p.shape == (3, 5) else 1)
    )
    _, record = tabulate(Rotary())
    assert record.status == "no_match" and "depends on more than the position: at (3, 5)" in record.reason


def test_a_wrong_table_is_caught_by_the_check(monkeypatch):
    right = TabulateRope.table
    monkeypatch.setattr(TabulateRope, "table", lambda self, *given: right(self, *given).roll(1, 0))
    with pytest.raises(TransformError, match="is off by"):
        tabulate(Rotary())
