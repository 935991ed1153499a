"""graft diff: nothing between equal graphs, exactly what was planted otherwise, equal layers told once."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx import Graph, map_arg

from graft.ir.folding import folded_text
from graft.ir.trace import export_graph
from graft.passes.config import load_config
from graft.workbench.diff import diff_graphs
from graft.workbench.diff_text import graph_dict, graph_lines, markdown
from graft.workbench.dump import dump_model
from graft.workbench.layers import fold, ranges
from graft.workbench.runs import open_run
from marks import examples

aten = torch.ops.aten
UNARY = (aten.relu.default, aten.neg.default, aten.sin.default)
BINARY = (aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor)
MODULES = ("", "layers.0.mlp", "layers.1.mlp")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    dump_model("tiny-llama", folder, load_config())
    return open_run(folder)


@pytest.fixture(scope="module")
def llama(run):
    return run.around("fuse_rms_norm")[0].graph().graph


def copied(graph, names=lambda node, _: node.name, order=None):
    """A copy with other names, or with its nodes in another order."""
    made, to = Graph(), {}
    for index, node in enumerate(order or graph.nodes):
        args, kwargs = map_arg(node.args, to.__getitem__), map_arg(node.kwargs, to.__getitem__)
        to[node] = made.create_node(node.op, node.target, args, kwargs, names(node, index))
        to[node].meta = dict(node.meta)
    return made


def shuffled(graph, random):
    """Another order in which everything still comes before its readers."""
    waiting = {node: len(node.all_input_nodes) for node in graph.nodes}
    ready, order = [n for n, count in waiting.items() if not count], []
    while ready:
        calls = [node for node in ready if node.op != "output"]
        node = random.choice(calls) if calls else ready[0]
        ready.remove(node)
        order.append(node)
        for reader in node.users:
            waiting[reader] -= 1
            if not waiting[reader]:
                ready.append(reader)
    return order


@st.composite
def graphs(draw):
    """Elementwise calls on two inputs and a weight, in modules or not, some of them equal."""
    graph = Graph()
    nodes = [graph.placeholder("x"), graph.placeholder("y"), graph.get_attr("layers.0.weight")]
    for _ in range(draw(st.integers(3, 25))):
        pick = st.sampled_from(nodes)
        if draw(st.booleans()):
            node = graph.call_function(draw(st.sampled_from(UNARY)), (draw(pick),))
        else:
            other = draw(st.one_of(pick, st.integers(2, 4)))
            node = graph.call_function(draw(st.sampled_from(BINARY)), (draw(pick), other))
        module = draw(st.sampled_from(MODULES))
        node.meta = {"nn_module_stack": {"m": (module, "M")}, "stack_trace": f'File "/m.py", line {len(nodes)}, in f'}
        nodes.append(node)
    graph.output(tuple(n for n in nodes if not n.users))
    for node in graph.nodes:
        node.meta["value_text"] = "f32[2, 4]"
    return graph


def calls_of(graph):
    return [node for node in graph.nodes if node.op == "call_function"]


def kinds(diff):
    return {kind: count for kind, count in diff.counts.items() if count}


@given(graphs(), st.randoms(use_true_random=False))
@settings(max_examples=examples(60), deadline=None)
def test_a_graph_does_not_differ_from_itself_renamed_or_reordered(graph, random):
    assert not diff_graphs(graph, graph)
    assert not diff_graphs(graph, copied(graph, lambda _, index: f"n{index}"))
    assert not diff_graphs(graph, copied(graph, lambda _, index: f"n{index}", shuffled(graph, random)))


@given(graphs(), st.data())
@settings(max_examples=examples(80), deadline=None)
def test_a_planted_change_is_found_and_no_more_is_told(graph, data):
    changed = copied(graph, lambda _, index: f"n{index}")
    node = data.draw(st.sampled_from(calls_of(changed)))
    what = data.draw(st.sampled_from(["removed", "rewired", "literal", "dtype", "stack_trace", "added"]))
    readers, planted = len(node.users), 1
    if what == "removed":
        source = node.all_input_nodes[0]
        node.replace_all_uses_with(source)
        changed.erase_node(node)
        planted += readers
    elif what == "rewired":
        earlier = [n for n in changed.nodes if n < node and n is not node.args[0] and n.op != "output"]
        node.update_arg(0, data.draw(st.sampled_from(earlier)))
    elif what == "literal":
        node.args = (*node.args, 7)
    elif what == "dtype":
        node.meta = {**node.meta, "value_text": "f16[2, 4]"}
    elif what == "stack_trace":
        node.meta = {k: v for k, v in node.meta.items() if k != "stack_trace"}
    else:
        with changed.inserting_after(node):
            new = changed.call_function(aten.cos.default, (node,))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        planted += readers
    diff = diff_graphs(graph, changed)
    assert 1 <= len(diff.changes) <= planted, [c.to_dict() for c in diff.changes]
    found = kinds(diff)
    if what in ("dtype", "stack_trace"):
        (change,) = diff.changes
        assert (change.kind, [d.what for d in change.details]) == ("metadata", [what])
    elif what == "literal":
        assert found == {"literal": 1}
    elif what in ("removed", "added"):
        assert found[what] == 1 and set(found) <= {what, "rewired"}
    else:
        assert found == {"rewired": 1}


def values(node):
    return node.meta["value_text"]


def named(graph, pattern):
    return next(node for node in graph.nodes if re.fullmatch(pattern, node.name))


def test_planted_changes_in_a_model_are_found_and_nothing_else(llama):
    changed = copied(llama, lambda _, index: f"n{index}")
    assert not diff_graphs(llama, changed)
    pairs = dict(zip(llama.nodes, changed.nodes, strict=True))
    rsqrt = next(n for n in llama.nodes if n.target is aten.rsqrt.default)
    pairs[rsqrt].replace_all_uses_with(pairs[rsqrt].args[0])
    changed.erase_node(pairs[rsqrt])
    epsilon = [n for n in llama.nodes if n.target is aten.add.Tensor and not isinstance(n.args[1], torch.fx.Node)][2]
    pairs[epsilon].args = (pairs[epsilon].args[0], 0.5)
    silu = [n for n in llama.nodes if n.target is aten.silu.default][1]
    del pairs[silu].meta["stack_trace"]
    pairs[silu].meta["value_text"] = values(silu).replace("bf16", "f16")
    keys = [
        n for n in llama.nodes if n.target is aten.linear.default and "1.self_attn.k_proj" in str(n.args[1].target)
    ]
    values_ = next(n for n in keys[0].args[0].users if "1.self_attn.v_proj" in str(n.args[1].target))
    pairs[keys[0]].replace_all_uses_with(pairs[values_])  # layer 1 attends to its values
    diff = diff_graphs(llama, changed)
    assert kinds(diff) == {"removed": 1, "literal": 1, "metadata": 1, "rewired": 1 + len(keys[0].users)}
    (removed,), (literal,), (metadata,) = (diff.of(kind) for kind in ("removed", "literal", "metadata"))
    assert removed.before.name == rsqrt.name and removed.layer.index == 0
    assert [(d.what, d.before, d.after) for d in literal.details] == [("other", "1e-06", "0.5")]
    assert literal.before.name == epsilon.name
    assert [(d.what, d.before, d.after) for d in metadata.details] == [
        ("dtype", "bf16", "f16"),
        ("stack_trace", "activations.py:103", "lost"),
    ]
    assert {c.before.name for c in diff.of("rewired")} == {n.name for n in (*rsqrt.users, *keys[0].users)}


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("nn_module_stack", {}, ["module"]),
        ("made_by", "somebody", ["made_by"]),
        ("value_text", "bf16[9, 9]@meta", ["shape"]),
        ("value_text", "bf16[s44, s70, 32]@cuda:0", ["device"]),
        ("value_text", "(f32[2], f32[2])", ["value"]),
    ],
)
def test_every_kind_of_metadata_is_compared(llama, key, value, what):
    changed = copied(llama)
    place = next(n for n in changed.nodes if n.op == "call_function" and values(n) == "bf16[s44, s70, 32]@meta")
    place.meta[key] = value
    (change,) = diff_graphs(llama, changed).changes
    assert change.kind == "metadata" and [d.what for d in change.details] == what


def test_symbols_are_numbered_by_torch_and_are_no_difference(llama):
    changed = copied(llama)
    for node in changed.nodes:
        node.meta["value_text"] = (values(node) or "").replace("s44", "s7").replace("s70", "s9") or None
    assert not diff_graphs(llama, changed)
    node = next(n for n in changed.nodes if n.op == "call_function" and (values(n) or "").startswith("bf16[s7, s9"))
    node.meta["value_text"] = values(node).replace("s7, s9", "s9, s7")  # batch and length changed places
    (change,) = diff_graphs(llama, changed).changes
    assert [(d.what, d.after) for d in change.details] == [("shape", "s70, s44, 32")]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, layers=32):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sin()


def edited(graph, wrong=7, untouched=()):
    """relu → gelu in every layer; in layer `wrong` also another literal; nothing in those `untouched`."""
    changed = copied(graph, lambda _, index: f"n{index}")
    relus = [node for node in changed.nodes if node.target is aten.relu.default]
    for index, node in enumerate(relus):
        if index in untouched:
            continue
        node.target = aten.gelu.default
        if index == wrong:
            node.kwargs = {"approximate": "tanh"}
    return changed


@pytest.fixture(scope="module")
def stack():
    return export_graph(Stack(), (torch.randn(2, 8),)).graph


def test_equal_layers_are_told_once_and_the_other_one_is_named(stack):
    diff = diff_graphs(stack, edited(stack))
    usual, odd = fold(diff).layers
    assert usual.indices == (*range(7), *range(8, 32)) and odd.indices == (7,)
    assert [c.kind for c in odd.missing] == ["added"] and [c.kind for c in odd.extra] == ["added"]
    text = [line.text for line in graph_lines(diff)]
    assert text[0] == "layers 0–6, 8–31 × 31, layer 0 shown"
    assert sum("gelu" in line for line in text) == 3  # once for all layers, and in layer 7: not so, but else
    place = text.index("layer 7 differs: 1 of these not there, 1 other")
    assert "not there: " in text[place + 1] and "approximate=tanh" in text[place + 2]
    every = [line.text for line in graph_lines(diff, unfold=True)]
    assert "layer 31" in every and sum("gelu" in line and line.startswith("  +") for line in every) == 32
    document = graph_dict(diff)
    assert document["layers"][1] == {"stack": "layers", "layers": [7], "changes": 3, "usual": False}
    assert document["counts"]["added"] == 32 and len(document["changes"]) == len(diff.changes)


def test_a_layer_without_a_change_is_named_and_another_source_is_seen(stack):
    text = [line.text for line in graph_lines(diff_graphs(stack, edited(stack, None, untouched=(7, 9))))]
    assert "layers 7, 9 × 2 differ: nothing changed there" in text
    changed = edited(stack, None)
    adds = [node for node in changed.nodes if node.target is aten.add.Tensor]
    adds[20].replace_input_with(adds[20].args[0], adds[11])  # layer 20 adds to the result of layer 11
    odd = [group for group in fold(diff_graphs(stack, changed)).layers if not group.usual]
    assert [group.indices for group in odd] == [(20,)] and len(odd[0].extra) == 1


def test_another_value_of_the_layer_above_is_seen_though_every_layer_reads_others(stack):
    """Every layer adds to a copy of what it added to; layer 5 to that of an earlier value of the layer above."""
    changed = edited(stack, None, untouched=range(32))
    adds = [node for node in changed.nodes if node.target is aten.add.Tensor]
    for index, node in enumerate(adds):
        source = adds[4].args[1] if index == 5 else node.args[0]  # of one shape, and both in layer 4
        with changed.inserting_before(node):
            copy = changed.call_function(aten.clone.default, (source,))
        copy.meta = dict(node.meta)
        node.update_arg(0, copy)
    usual, odd = fold(diff_graphs(stack, changed)).layers
    assert usual.indices == (*range(5), *range(6, 32)) and odd.indices == (5,)
    assert [(c.kind, c.node.op) for c in odd.extra] == [("added", "aten.clone")]


def test_equal_layers_stand_once_in_the_text(stack):
    text = folded_text(stack)
    assert len(text.splitlines()) < len(list(stack.nodes)) / 4 and "# layer 31: 8 nodes, as in layer 0" in text
    odd = folded_text(edited(stack, 7, untouched=[i for i in range(32) if i != 7]))
    assert "as in layer 7" not in odd and "# layer 8: 8 nodes, as in layer 0" in odd and "approximate=tanh" in odd
    changed = edited(stack, None, untouched=range(32))
    adds = [node for node in changed.nodes if node.target is aten.add.Tensor]
    adds[5].update_arg(0, adds[4].args[1])  # of one shape, and both in layer 4
    assert "# layer 5:" not in folded_text(changed) and "# layer 6: 8 nodes, as in layer 0" in folded_text(changed)


def test_one_dtype_for_another_in_the_whole_model_is_one_line(stack):
    double = export_graph(Stack().double(), (torch.randn(2, 8).double(),)).graph
    diff = diff_graphs(stack, double)
    assert len(diff.changes) == diff.counts["metadata"] == len(diff.after) - 1
    assert [line.text for line in graph_lines(diff)] == [f"  ~ dtype f32 → f64 in {len(diff.changes)} nodes"]


def test_markdown_is_headings_and_diff_blocks(stack):
    text = markdown(graph_lines(diff_graphs(stack, edited(stack))))
    blocks = re.findall(r"```diff\n(.*?)\n```", text, re.S)
    assert text.startswith("### layers 0–6, 8–31 × 31") and text.count("```") == 2 * len(blocks)
    assert all(line[0] in "+-!" for block in blocks for line in block.splitlines())


def test_ranges_of_layers():
    assert ranges((3,)) == "3" and ranges((0, 1, 2, 8, 5, 6)) == "0–2, 5–6, 8"
