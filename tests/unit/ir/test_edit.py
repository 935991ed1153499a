"""Abstract values of new calls: sizes that are open stay open."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from graft.base.errors import VerificationError
from graft.ir.edit import Editor
from graft.ir.nodes import calls, placeholders, tensor_of
from graft.ir.trace import export_graph

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


def test_a_call_that_fixes_open_sizes_is_refused_by_name():
    gm, mul = graph()
    with pytest.raises(VerificationError, match=r"fixing.double.* fixes sizes that are open in the graph \(.* = 3"):
        Editor(gm, "test").call(torch.ops.fixing.double.default, (mul,), before=mul.next, like=mul)
