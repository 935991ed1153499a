"""Symbolic sizes as text and back, and graphs whose values hold them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graft.base.errors import DumpError
from graft.ir.io.serial import graph_from_json, graph_to_json
from graft.ir.io.symbols import Symbol, check_readable, declare, evaluate, fresh_mode, symbols_of
from graft.ir.io.text import graph_text
from graft.ir.io.values import ValueReader, ValueWriter
from graft.ir.nodes import tensor_val
from graft.ir.trace import export_graph
from graft.ir.verify import module_state, verify

SYMBOLS = [Symbol("s0", 6, 2, 64), Symbol("s44", 9, 0, None, positive=False), Symbol("u0", None, None, None, False)]


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("s0", 6),
        ("2*s0 + 1", 13),
        ("s0**2 - s44", 27),
        ("((s0*s44)//4)", 13),
        ("Max(3, s0)", 6),
        ("Max(3, s0, s44)", 9),
        ("Min(3, s0)", 3),
        ("Mod(s0, 4)", 2),
        ("PythonMod(s44, 4)", 1),
        ("-s0", -6),
    ],
)
def test_an_expression_comes_back_as_it_was_printed(text, at):
    mode = fresh_mode()
    value = evaluate(text, declare(SYMBOLS, mode))
    assert str(value) == str(evaluate(str(value), declare_again(mode)))
    assert value.node.hint == at
    check_readable(str(value))
    assert mode.shape_env.guards == []  # reading a size decides nothing about it


def test_a_known_range_simplifies_what_is_read():
    value = evaluate("PythonMod(s1, 4)", declare([Symbol("s1", 3, 0, 6, positive=False)], fresh_mode()))
    assert str(value) == "Mod(s1, 4)" and value.node.hint == 3


def declare_again(mode):
    env = mode.shape_env
    by_name = {str(symbol): symbol for symbol in env.var_to_range}
    return {s.name: env.create_symintnode(by_name[s.name], hint=s.hint) for s in SYMBOLS}


def test_symbols_keep_hint_and_range():
    names = declare(SYMBOLS, fresh_mode())
    assert symbols_of([names["s0"] + names["s44"]]) == (SYMBOLS[0], SYMBOLS[1])
    (unbacked,) = symbols_of([[(names["u0"],)]])
    assert (unbacked.hint, unbacked.upper) == (None, None)


@pytest.mark.parametrize(
    "text", ["open('x')", "s0.real", "Unheard(s0)", "s9", "s0 if s0 else 1", "[s0]", "s0 +", "'a'"]
)
def test_nothing_but_sizes_is_read(text):
    with pytest.raises(DumpError, match="cannot be read"):
        evaluate(text, declare(SYMBOLS, fresh_mode()))


@pytest.mark.parametrize("text", ["Unheard(s0)", "s0/2", "s0 @ s0"])
def test_what_could_not_be_read_is_not_written(text):
    with pytest.raises(DumpError, match="cannot be stored"):
        check_readable(text)


def test_tensors_of_one_storage_share_it_again():
    base = torch.zeros(4, 6)
    writer = ValueWriter()
    entries = [writer.encode(t) for t in (base, base[1:, 2:], base.t(), torch.zeros(3))]
    reader = ValueReader([])
    got = [reader.decode(entry) for entry in entries]
    for left, right in zip(got, (base, base[1:, 2:], base.t(), torch.zeros(3)), strict=True):
        assert (left.shape, left.stride(), left.storage_offset()) == (
            right.shape, right.stride(), right.storage_offset())  # fmt: skip
    storages = [t.untyped_storage()._cdata for t in got]
    assert storages[0] == storages[1] == storages[2] != storages[3]


class Sizes(nn.Module):
    """Sizes from data, from other sizes, and from a number."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4, dtype=torch.int8), persistent=False)

    def forward(self, x, y, k):
        self.seen.add_(1)
        rows = torch.nonzero(y)
        return (
            x[:, : y.shape[1] // 2].sum() * max(x.shape[0], 3),
            x.reshape(x.shape[0] * x.shape[1] // 2, 2),
            x.roll(x.shape[0] % 3 + k),
            rows.float() + 1,
            [y[:k], self.seen],
        )


LAYOUTS = {
    "rows": lambda x: x * 1,
    "another dim first": lambda x: (x * 1).permute(1, 0, 2),  # its last stride is 1, too
    "columns": lambda x: (x * 1).transpose(1, 2),
    "a part": lambda x: (x * 1)[1:],
    "fixed": lambda x: torch.ones(3, 4).t(),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_open_sizes_come_back(name):
    dims = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)

    class Laid(nn.Module):
        def forward(self, x):
            return LAYOUTS[name](x) + 0, LAYOUTS[name](x)

    gm = export_graph(Laid(), (torch.randn(5, 7, 8),), dynamic_shapes=dims)
    back = graph_from_json(graph_to_json(gm, exact=True), module_state(gm))
    pairs = zip(gm.graph.nodes, back.graph.nodes, strict=True)
    tensors = [(tensor_val(one), tensor_val(other)) for one, other in pairs if tensor_val(one) is not None]
    assert tensors and all(facts(one) == facts(other) for one, other in tensors)


def facts(tensor):
    sizes = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes())
    return str(sizes), tensor.dtype, tensor.device


def test_a_graph_with_sizes_of_all_kinds_is_kept_exactly():
    dim = torch.export.Dim
    dynamic = ({0: dim.DYNAMIC, 1: dim.DYNAMIC}, {1: dim("q", min=4, max=64)}, dim.DYNAMIC)
    gm = export_graph(Sizes(), (torch.ones(4, 8), torch.ones(6, 10), 3), dynamic_shapes=dynamic)
    again = graph_from_json(graph_to_json(gm, exact=True), module_state(gm))
    assert graph_text(again.graph) == graph_text(gm.graph)
    assert again.code == gm.code
    assert graph_to_json(again, exact=True) == graph_to_json(gm, exact=True)
    assert again.state_dict().keys() == gm.state_dict().keys() == set()
    verify(again)
    x, y = torch.randn(6, 10), (torch.randn(6, 12) > 0).float()
    expected = [*Sizes()(x, y, 4)]
    got = [*again(x, y, 4)]
    torch.testing.assert_close(got, expected)
