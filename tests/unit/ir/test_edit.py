"""Abstract values of new calls (sizes that are open stay open), and graphs that are put back as they were."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from graft.base.errors import VerificationError
from graft.ir.edit import Editor, attention_result
from graft.ir.nodes import calls, placeholders, tensor_of
from graft.ir.trace import export_graph
from graft.ir.verify import GraphSnapshot, module_state

aten = torch.ops.aten


class Double(nn.Module):
    def forward(self, x):
        return x * 2


@torch.library.custom_op("fixing::double", mutates_args=())
def fixing(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@fixing.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty([int(size) for size in x.shape])


def graph():
    gm = export_graph(Double(), (torch.randn(3, 5),), dynamic_shapes=({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},))
    (mul,) = calls(gm.graph)
    return gm, mul


def sizes(gm):
    (x,) = placeholders(gm.graph)
    return [str(size) for size in tensor_of(x).shape]


@pytest.mark.parametrize("pad", [(1, 2), (0, 3, 4, 0)])
@pytest.mark.parametrize("op", [aten.pad.default, aten.constant_pad_nd.default], ids=str)
def test_padding_keeps_open_sizes(op, pad):
    gm, mul = graph()
    before = sizes(gm)
    made = Editor(gm, "test").call(op, (mul, list(pad)), before=mul.next, like=mul)
    assert sizes(gm) == before and not any(size.isdigit() for size in before)
    for shape in ((3, 5), (7, 2)):
        found = [str(size) for size in tensor_of(made).shape]
        numbers = dict(zip(before, shape, strict=True))
        assert [eval(size, {}, numbers) for size in found] == list(F.pad(torch.zeros(shape), pad).shape)


@pytest.mark.parametrize("gqa", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (1, 4)])
def test_the_shape_of_attention_is_torchs(gqa, heads):
    """Its own rule keeps sizes open that torch's fixes for a GPU; what it does not know it leaves to torch."""
    q, k, v = torch.randn(2, heads[0], 5, 8), torch.randn(2, heads[1], 7, 8), torch.randn(2, heads[1], 7, 3)
    if gqa and heads[0] < heads[1]:
        pytest.skip("fewer heads of queries than of keys are no groups")
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=gqa)
    assert attention_result(q, k, v, None, 0.0, False, enable_gqa=gqa).shape == expected.shape


def test_attention_on_a_gpu_keeps_open_sizes():
    gm, mul = graph()
    before = sizes(gm)
    rows, columns = tensor_of(mul).shape
    with gm.graph.inserting_after(mul):
        mask = gm.graph.call_function(aten.alias.default, (mul,))
    with tensor_of(mul).fake_mode:  # nothing is there of them
        mul.meta["val"], mask.meta["val"] = (torch.empty(rows, size, device="cuda") for size in (columns, rows))
    args = (mul, mul, mul, mask)
    made = Editor(gm, "test").call(aten.scaled_dot_product_attention.default, args, before=mask.next, like=mul)
    assert [str(size) for size in tensor_of(made).shape] == before == sizes(gm)


def test_a_call_that_fixes_open_sizes_is_refused_by_name():
    gm, mul = graph()
    with pytest.raises(VerificationError, match=r"fixing.double.* fixes sizes that are open in the graph \(.* = 3"):
        Editor(gm, "test").call(torch.ops.fixing.double.default, (mul,), before=mul.next, like=mul)


def test_a_snapshot_brings_dropped_buffers_back_as_they_were():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.ones(3))
            self.register_buffer("passing", torch.ones(3) * 2, persistent=False)

    class Holding(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = Holder()
            self.register_buffer("outside", torch.ones(3) * 3, persistent=False)

        def forward(self, x):
            return x * self.inside.kept + self.inside.passing + self.outside

    gm = export_graph(Holding(), (torch.ones(3),))
    before, state = module_state(gm), set(gm.state_dict())
    snapshot = GraphSnapshot.take(gm)
    for name in before:
        owner, _, leaf = name.rpartition(".")
        delattr(gm.get_submodule(owner), leaf)
    snapshot.restore(gm)
    assert len(before) == 3 and len(state) == 1 and set(gm.state_dict()) == state
    assert {name: id(tensor) for name, tensor in module_state(gm).items()} == {n: id(t) for n, t in before.items()}
