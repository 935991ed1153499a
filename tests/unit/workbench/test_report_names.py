"""What a report calls things: sizes by what they count, merged weights by all names; parts without false arrows."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graft.ir.facts import Item, read_graph
from graft.ir.trace import export_graph
from graft.passes.report import MatchRecord, TransformRecord
from graft.workbench.report import collect, render
from graft.workbench.report.merged import add_merged, parts_of
from graft.workbench.report.packing import Readers, StringTable, port_name
from graft.workbench.report.parts import pack_step
from graft.workbench.report.sizes import SizeNames, size_names
from report_cases import dump_deep


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A decoder of two layers, through the whole pipeline."""
    return collect(dump_deep(tmp_path_factory.mktemp("run"), 2))


def item(index, name, op, reads=(), module="", value="f32[2]@meta", **given):
    inputs = tuple((slot, at) for slot, at in (reads if reads and isinstance(reads[0], tuple) else ()))
    inputs = inputs or tuple((str(number), at) for number, at in enumerate(reads))
    target = given.get("target", name if op == "input" else "")
    return Item(index, name, op, target, inputs, (), module, "", "", value, f"%{name}")


@pytest.mark.exhaustive
def test_sizes_of_a_decoder_are_words(data):
    assert data.sizes.names and set(data.sizes.names.values()) == {
        *("batch", "tokens", "logits", "seqs", "table_blocks", "cache_blocks")
    }
    texts = " ".join(data.graphs["strings"])
    assert "bf16[batch, tokens, 4096]" in texts and "i64[seqs + 1]" in texts
    assert not [symbol for symbol in data.sizes.names if f"{symbol}," in texts or f"{symbol}]" in texts]
    told = " ".join(line.text for view in data.transforms for line in view.lines)
    assert "[batch, tokens, " in told and not [s for s in data.sizes.names if f"[{s}," in told]
    last = data.graphs["steps"][-1]
    assert {"batch", "tokens"} <= {port for box in last["boxes"] for port in box[3]}


@pytest.mark.exhaustive
def test_candidates_have_the_words_too(data):
    text = render(data)
    assert "batch = 1" in text and "tokens = 1 and 512" in text
    shown = text[text.index('id="candidates"') : text.index('id="kernels"')]
    assert not [symbol for symbol in data.sizes.names if re.search(rf"(?<![%\w]){symbol}\b", shown)]


def test_sizes_of_another_module_are_those_of_its_inputs():
    inputs = [item(0, "x", "input", value="f32[s3, 8, s9]"), item(1, "y", "input", value="f32[s3, u0 + 1]")]
    names = size_names([inputs])
    assert names.names == {"s3": "x₀", "s9": "x₂"}
    assert names.meanings == {"x₀": "size 0 of x", "x₂": "size 2 of x"}
    assert names.text("%s3 = f(%x, s3, 2*s9) : u8[s3]") == "%s3 = f(%x, x₀, 2*x₂) : u8[x₀]"


def test_a_name_is_given_once():
    names = SizeNames()
    names.add("s1", "tokens", "")
    names.add("s2", "tokens", "")
    assert names.text("[s1, s2]") == "[tokens, tokens₂]"


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.lists(st.integers(0, 5), max_size=4)), max_size=5))
def test_two_symbols_never_share_a_name(inputs):
    items = [
        item(n, f"{name}{n}", "input", value=f"f32[{', '.join(f's{size}' for size in sizes)}]")
        for n, (name, sizes) in enumerate(inputs)
    ]
    names = size_names([items]).names
    assert len(set(names.values())) == len(names) == len({size for _, sizes in inputs for size in sizes})


def test_a_size_is_a_port_by_its_name():
    assert port_name(item(0, "sym_size_int_3", "aten.sym_size.int", value="tokens")) == "tokens"
    assert port_name(item(0, "cos", "aten.cos", value="f32[tokens]")) == "cos"


def test_a_merged_weight_has_all_its_names(data):
    texts = [text for text in data.graphs["strings"] if "q_proj.weight" in text and " + " in text]
    assert texts == [" + ".join(f"model.layers.*.self_attn.{name}_proj.weight" for name in "qkv")]
    number = data.graphs["strings"].index(texts[0])
    last = data.graphs["steps"][-1]
    strings = data.graphs["strings"]
    ops = {strings[node[1]] for part in last["parts"] for node in part["nodes"] if node[7] == number}
    assert ops == {"weight", "aten.linear"}
    drawn = next(view for view in data.transforms if view.record.name == "merge_qkv").drawings[0]
    assert {strings[node[1]] for node in drawn["nodes"] if node[7] == number} == {"weight", "aten.linear"}


def merged(linears, slot="weight"):
    """Two weights, or as many, that calls read in one slot, become one weight."""
    before = [item(n, f"w{n}", "weight", target=f"m.p{n}.weight") for n in range(linears)]
    before += [item(linears, "x", "input")]
    before += [item(linears + 1 + n, f"l{n}", "aten.linear", [("input", linears), (slot, n)]) for n in range(linears)]
    after = [item(0, "x", "input"), item(1, "w", "weight", target="m.all.weight")]
    after += [item(2, "l", "aten.linear", [("input", 0), ("weight", 1)])]
    replaced = tuple(f"l{n}" for n in range(linears))
    return before, after, TransformRecord("t", "fuse", "applied", (MatchRecord("%l0", "m", replaced, ("w", "l")),))


@given(st.integers(1, 6))
def test_parts_are_what_the_replaced_calls_read_in_that_slot(linears):
    parts: dict[str, tuple[str, ...]] = {}
    before, after, record = merged(linears)
    add_merged(parts, record, before, after)
    names = tuple(f"m.p{n}.weight" for n in range(linears))
    assert parts == ({"m.all.weight": names} if linears > 1 else {})
    assert parts_of(after[2], after, parts) == parts_of(after[1], after, parts) == parts.get("m.all.weight", ())
    add_merged(parts := {}, *reordered(merged(linears, slot="bias")))
    assert parts == {}, "what is read in another slot is no part"


def reordered(case):
    before, after, record = case
    return record, before, after


def test_a_weight_merged_again_has_the_names_of_the_first():
    before, after, record = merged(2)
    parts = {"m.p0.weight": ("m.a.weight", "m.b.weight")}
    add_merged(parts, record, before, after)
    assert parts["m.all.weight"] == ("m.a.weight", "m.b.weight", "m.p1.weight")


def test_norm_and_lm_head_have_no_arrow_both_ways(data):
    last = data.graphs["steps"][-1]
    titles = [box[1] for box in last["boxes"]]
    assert titles.count("norm") == titles.count("lm_head") == 2
    edges = {tuple(edge) for edge in last["edges"]}
    assert edges and not {(b, a) for a, b in edges} & edges
    chain = [titles[b] for b in follow(edges, titles.index("layer 1"))]
    assert chain == ["layer 1", "norm", "lm_head", "norm", "lm_head", "output"]


def follow(edges, at):
    yield at
    while after := [b for a, b in edges if a == at]:
        (at,) = after
        yield at


@given(st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 30), max_size=2)), max_size=14))
def test_no_two_parts_read_each_other(calls):
    """Of any graph of modules: the overview has an edge where one is, and no circle."""
    items = [item(0, "x", "input")]
    for number, (module, reads) in enumerate(calls, 1):
        items.append(item(number, f"n{number}", "aten.sin", [at % number for at in reads], module=module))
    step = pack_step(items, StringTable())
    edges = {tuple(edge) for edge in step["edges"]}
    order: dict[int, int] = {}
    while free := [
        n for n in range(len(step["boxes"])) if n not in order and all(a in order for a, b in edges if b == n)
    ]:
        order |= dict.fromkeys(free, len(order))
    assert len(order) == len(step["boxes"]), "a circle"
    part_of = {node[0]: n for n, part in enumerate(step["parts"]) for node in part["nodes"]}
    box_of = {box[0]: n for n, box in enumerate(step["boxes"])}
    ports = Readers(items).ports
    wanted = {
        (box_of[part_of[items[i].name]], box_of[part_of[one.name]])
        for one in items
        for _, i in one.inputs
        if items[i].op != "input" and i not in ports
    }
    assert edges == {(a, b) for a, b in wanted if a != b}


def test_a_module_that_is_called_twice_is_two_parts():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.a(self.b(self.a(x)))

    items = read_graph(export_graph(Twice().eval(), (torch.randn(2, 4),)).graph)
    step = pack_step(items, StringTable())
    titles = [box[1] for box in step["boxes"]]
    linked = [(titles[a], titles[b]) for a, b in step["edges"]]
    assert linked == [("a", "b"), ("b", "a"), ("a", "output")] and titles.count("a") == 2
    assert all(a != b for a, b in pairwise(titles))
