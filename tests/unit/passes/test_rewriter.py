"""The driver of transforms: order, refusals, what others see meanwhile, skipped graphs, records, roll-back."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import graft
from graft import Context, Match, PatternTransform, Refused, Rewrite, Rewriter
from graft.base.authors import told
from graft.base.errors import PatternError, TransformError
from graft.ir.edit import second_module
from graft.ir.io.text import graph_text
from graft.ir.nodes import calls, is_op
from graft.ir.trace import export_graph
from graft.passes.base import Stage, TransformConfig
from graft.passes.config import DEFAULTS
from graft.passes.pipeline import run_one
from graft.passes.registry import TransformRegistry, load_all
from marks import examples

aten = torch.ops.aten
X = torch.linspace(-2, 2, 12).view(3, 4)
SETTINGS = TransformConfig(Stage.MATCH)


class Program(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def graph_of(function, args=(X,)):
    return export_graph(Program(function), args)


class Absolute(Rewriter):
    """relu(neg(x)) becomes relu(mul(x, -1)); a neg that reads a tanh is refused."""

    name = "absolute"
    lacking = "the graph has no relu"

    def candidates(self, run):
        return [node for node in calls(run.gm.graph) if is_op(node, aten.relu.default)]

    def find(self, run, relu):
        neg = relu.args[0]
        if not is_op(neg, aten.neg.default):
            return None
        if is_op(neg.args[0], aten.tanh.default):
            raise Refused(neg.args[0], "it is a tanh")
        return Match("spelled", {"x": neg.args[0]}, {}, (relu, neg), (relu,))

    def write(self, run, match):
        relu, neg = match.nodes
        mul = run.editor.call(aten.mul.Tensor, (neg.args[0], -1), before=relu, like=neg)
        made = run.editor.call(aten.relu.default, (mul,), before=relu, like=relu)
        run.editor.replace(relu, made)
        return [mul, made]


def applied(function, transform=Absolute, **settings):
    gm = graph_of(function)
    options = TransformConfig(Stage.MATCH, **settings)
    record = run_one(gm, transform(options), options, Context(), "matches")
    return gm, record


def twice(x):
    return torch.relu(-torch.relu(-x))


def test_names_of_a_pass_author_are_in_graft():
    names = ("BaseTransform", "Rewriter", "PatternTransform", "Rewrite", "Match", "Refused", "Context", "Outcome")
    assert {*names, "TransformConfig", "TransformRegistry"} <= set(graft.__all__)
    assert all(getattr(graft, name).__name__ == name for name in names)


def test_a_record_says_where_what_was_replaced_what_was_made_and_who_stands_for_whom():
    gm, record = applied(lambda x: torch.relu(-x) + 1)
    (match,) = record.matches
    assert (match.anchor.split()[0], match.pattern, match.note) == ("%relu", "spelled", "")
    assert (match.replaced, match.made) == (("relu", "neg"), ("mul_tensor", "relu_default"))
    assert match.successors == (("relu", "relu_default"),)
    assert match.numeric_check is not None and match.numeric_check.error == 0.0
    assert not {"relu", "neg"} & {node.name for node in gm.graph.nodes}  # what is dead is erased
    assert "graft_replaced" not in gm.meta
    assert graft.Report("m", {record.name: record}).from_json(
        graft.Report("m", {record.name: record}).to_json()
    ).transforms[record.name].matches == (match,)


def test_a_refusal_is_a_near_miss_at_the_node_that_stopped_it():
    _, record = applied(lambda x: torch.relu(-torch.tanh(x)))
    (miss,) = record.near_misses
    assert (miss.pattern, miss.anchor.split()[0], miss.node, miss.reason) == (
        *("absolute", "%relu", "%tanh"), "it is a tanh",
    )  # fmt: skip
    assert (record.status, record.matches) == ("no_match", ())
    assert record.reason.startswith("1 near misses; closest at %relu")


def test_without_a_candidate_the_reason_is_what_the_graph_lacks():
    assert applied(lambda x: x + 1)[1].reason == "the graph has no relu"
    assert applied(torch.relu)[1].reason == "the graph has no relu"  # a candidate that is something else altogether


def test_a_graph_that_it_is_not_for_is_skipped_and_stays():
    class Elsewhere(Absolute):
        def applies(self, gm, context):
            return f"not on the route {context.route}"

    gm, record = applied(twice, Elsewhere)
    assert (record.status, record.reason) == ("skipped", "not on the route module")
    assert graph_text(gm.graph) == graph_text(graph_of(twice).graph)


@pytest.mark.parametrize("first", [False, True])
def test_candidates_are_seen_in_the_graph_of_then_or_in_the_first(first):
    """In turn, the second finds what the first made; found first, both see the model's own nodes."""
    seen = []

    class Seen(Absolute):
        find_first = first

        def find(self, run, relu):
            match = super().find(run, relu)
            seen.append(match.tensors["x"].name)
            return match

    gm, record = applied(twice, Seen)
    assert seen == (["x", "relu"] if first else ["x", "relu_default"])
    assert [match.made for match in record.matches] == [
        ("mul_tensor", "relu_default"), ("mul_tensor_1", "relu_default_1"),
    ]  # fmt: skip
    assert torch.equal(gm(X.clone()), twice(X))


def test_of_two_matches_with_a_node_in_common_the_first_is_taken():
    class Twice(Absolute):
        find_first = True

        def candidates(self, run):
            return super().candidates(run) * 2

    _, record = applied(by_hand, Twice)
    assert [match.replaced for match in record.matches] == [("relu", "neg")]
    (miss,) = record.near_misses
    assert "is part of an earlier match" in miss.reason


def second_reader(x):
    y = -x
    return torch.relu(y), y


def written_between(x):
    z = x + 1
    y = -z
    z.add_(1)
    return torch.relu(y) + z


@pytest.mark.parametrize(
    ("function", "reason"),
    [(second_reader, "has a second reader"), (written_between, "is written in place between the nodes of the match")],
)
def test_what_others_read_or_write_meanwhile_is_refused(function, reason):
    _, record = applied(function)
    assert not record.matches
    assert reason in record.near_misses[0].reason
    careless = type("Careless", (Absolute,), {"check": lambda self, run, match: None})
    assert not applied(function, careless, on_error="skip")[1].near_misses  # nobody else refuses it


class Wrecks(Absolute):
    """The second write raises; the first one must go too."""

    def write(self, run, match):
        run.context.notes.append("written")
        if run.records:
            raise RuntimeError("no room")
        return super().write(run, match)


def test_a_write_that_raises_takes_everything_back():
    before = graph_text(graph_of(twice).graph)
    gm = graph_of(twice)
    with pytest.raises(TransformError, match="no room"):
        run_one(gm, Wrecks(SETTINGS), SETTINGS, Context())
    assert graph_text(gm.graph) == before
    options, context = TransformConfig(Stage.MATCH, on_error="skip"), Context()
    record = run_one(gm, Wrecks(options), options, context)
    assert (record.status, context.notes) == ("rolled_back", [])
    assert graph_text(gm.graph) == before


def test_a_refusal_in_write_is_too_late():
    class Late(Absolute):
        def write(self, run, match):
            raise Refused(match.anchor, "too late")

    with pytest.raises(TransformError, match="too late"):
        applied(twice, Late)


@dataclass(frozen=True)
class Pair:
    """A candidate that is no node."""

    anchor: torch.fx.Node
    other: torch.fx.Node


def test_a_candidate_may_be_several_nodes_told_at_its_anchor():
    class Pairs(Absolute):
        size = 7

        def candidates(self, run):
            return [Pair(node, node.args[0]) for node in super().candidates(run)]

        def find(self, run, pair):
            raise Refused(pair.other, "not today")

    _, record = applied(twice, Pairs)
    assert [(m.anchor.split()[0], m.node, m.matched, m.size) for m in record.near_misses] == [
        ("%relu", "%neg", 1, 7),
        ("%relu_1", "%neg_1", 1, 7),
    ]


def test_what_a_run_reads_once_and_leaves_at_the_end():
    class Counting(Absolute):
        def finish(self, run):
            run.context.notes.append(f"{len(run.records)} of {len(run.misses) + len(run.records)}")

    gm, context = graph_of(lambda x: torch.relu(-torch.tanh(x)) + torch.relu(-x)), Context()
    run_one(gm, Counting(SETTINGS), SETTINGS, context)
    assert context.notes == ["1 of 2"]


# ── patterns run in the same loop ───────────────────────────────────────────────────────────────────────────────


def by_hand(x):
    return torch.relu(-x)


def replaced(x):
    return torch.relu(x * -1)


def small(match):
    if match.tensors["x"].meta["val"].dim() > 2:
        raise Refused(match.tensors["x"], "too many dims")


class Spelled(PatternTransform):
    name = "spelled"

    def rewrites(self):
        return [Rewrite(by_hand, replaced, {"x": "b d"}, small)]


def test_patterns_are_rewriters_with_no_loop_of_their_own():
    assert issubclass(PatternTransform, Rewriter)
    assert PatternTransform.apply is Rewriter.apply
    gm, record = applied(twice, Spelled)
    assert [match.successors for match in record.matches] == [
        (("relu", "relu_default"),), (("relu_1", "relu_default_1"),),
    ]  # fmt: skip
    assert [node.target for node in calls(gm.graph)] == [aten.mul.Tensor, aten.relu.default] * 2


def test_a_check_of_a_pattern_refuses_with_the_same_exception():
    gm = graph_of(by_hand, (X[None],))
    record = run_one(gm, Spelled(SETTINGS), SETTINGS, Context())
    assert [(miss.node, miss.reason) for miss in record.near_misses] == [("%x", "too many dims")]


# ── any program ─────────────────────────────────────────────────────────────────────────────────────────────────

STEPS = {
    "neg": torch.neg,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "write": lambda x: x.add_(1),
}


def program(steps):
    """Each step reads one of the values so far; all values are summed."""

    def run(x):
        values = [x + 0]
        for name, index in steps:
            values.append(STEPS[name](values[index % len(values)]))
        return sum(value * (i + 1) for i, value in enumerate(values))

    return run


@settings(max_examples=examples(12), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 3)), min_size=2, max_size=7))
def test_every_place_is_a_match_or_a_near_miss_and_the_numbers_stay(steps):
    run = program(steps)
    captured = graph_of(run)
    for transform in (Absolute, type("First", (Absolute,), {"find_first": True})):
        gm = second_module(captured)
        places = [n for n in calls(gm.graph) if is_op(n, aten.relu.default) and is_op(n.args[0], aten.neg.default)]
        names = {node.name for node in places}
        record = run_one(gm, transform(SETTINGS), SETTINGS, Context())
        anchors = {match.anchor.split()[0][1:] for match in record.matches}
        missed = {miss.anchor.split()[0][1:] for miss in record.near_misses}
        assert anchors | missed == names and not anchors & missed
        assert torch.equal(gm(X.clone()), run(X.clone()))


def test_half_of_the_library_are_patterns_and_walks_say_why_they_are_not():
    load_all()
    listed = yaml.safe_load(DEFAULTS.read_text())["transforms"]
    library = {name: TransformRegistry.get(name) for name in listed}
    patterns = [name for name, kind in library.items() if issubclass(kind, PatternTransform)]
    rewrites = [name for name, settings in listed.items() if settings["stage"] != "shard"]  # a part is no pattern
    assert 2 * len(patterns) >= len(rewrites), patterns
    for name in set(library) - set(patterns):
        assert "A walk" in library[name].__doc__, f"{name} walks the graph and does not say why"


# ── what authors get wrong ──────────────────────────────────────────────────────────────────────────────────────


def test_rewrites_that_are_no_method_are_told_where_the_class_is():
    with pytest.raises(PatternError, match=r"Tuple\.rewrites is a tuple, .* def rewrites\(self\)") as raised:
        type("Tuple", (PatternTransform,), {"rewrites": (), "__doc__": "For a test."})
    assert "test_rewriter.py" in told(raised.value)


def test_what_is_no_rewrite_is_told():
    class Pairs(PatternTransform):
        """For a test."""

        name = "pairs"

        def rewrites(self):
            return [(torch.sin, torch.cos)]

    with pytest.raises(TransformError, match=r"Pairs\.rewrites gives a tuple where a Rewrite is due"):
        applied(torch.sin, Pairs)
