"""The search for what is wrong: by halves over transforms, then over the matches of one."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from check_cases import capture_once, faulty_swiglu, plant, scale
from graft.base.errors import VerificationError
from graft.ir.io.text import graph_text
from graft.ir.nodes import calls
from graft.passes.config import load_config
from graft.passes.partial import with_matches
from graft.workbench.check import CheckRequest, check
from graft.workbench.check.bisect import TransformReplay, bound, first_bad
from graft.workbench.check.outputs import StepLogits, distance
from graft.workbench.check.scenario import logits
from graft.workbench.check.trial import try_model
from marks import left_out, short

CONFIG = load_config()
CHOSEN = ("fuse_rope", "fuse_add_rms_norm", "merge_qkv", "fuse_residual_into_matvec")


@pytest.fixture(scope="module", autouse=True)
def captured():
    with pytest.MonkeyPatch.context() as patch:
        capture_once(patch)
        yield


@pytest.fixture(scope="module")
def trial(captured, tmp_path_factory):
    return try_model("tiny-llama", CONFIG, tmp_path_factory.mktemp("run"))


def checked(transform="", model="tiny-llama", **options):
    return check(model, CheckRequest(CONFIG, transform, **options))


@given(st.integers(1, 3000).flatmap(lambda count: st.tuples(st.just(count), st.integers(1, count))))
def test_the_first_bad_one_is_found_in_log_time(case):
    count, first = case
    asked = []
    assert first_bad(count, lambda k: asked.append(k) or k >= first) == first
    assert len(asked) <= math.ceil(math.log2(count)) if count > 1 else not asked
    assert len(set(asked)) == len(asked) and 0 not in asked and count not in asked


@given(st.lists(st.booleans(), max_size=60))
def test_where_bad_does_not_stay_bad_a_boundary_is_found(middle):
    bad = [False, *middle, True]
    found = first_bad(len(bad) - 1, lambda k: bad[k])
    assert bad[found] and not bad[found - 1]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "matches", "number"),
    [
        ("fuse_rms_norm", 5, 4),
        left_out(("fuse_rope", 4, 2)),
        left_out(("fuse_add_rms_norm", 4, 4)),
        ("merge_qkv", 2, 2),
        left_out(("fuse_residual_into_matvec", 4, 3)),
        left_out(("tabulate_rope", 1, 1)),
    ],
)
def test_a_wrong_match_is_found_within_the_bound(monkeypatch, name, matches, number):
    scale(monkeypatch, name, 1.1, at=[number - 1])
    report = checked(name)
    found = report.bisection
    assert (found.transform, found.number, found.matches, found.why_no_match) == (name, number, matches, "")
    assert found.error > found.limit and found.runs <= found.bound <= 2 + 4 + 3
    assert found.match in report.whole[0].reason and report.whole[0].verdict == "fail" and not report.ok


@pytest.mark.some(1)
@pytest.mark.parametrize("fault", ["one token", "above 64 tokens"])
def test_what_is_wrong_for_some_sizes_is_found_at_its_match(monkeypatch, fault):
    """In decode steps alone: a prompt of a few tokens shows nothing."""
    faulty_swiglu(monkeypatch, fault, at=1)
    report = checked("fuse_swiglu")
    assert report.checks[0].of("numerics").verdict == "fail" and report.whole[0].verdict == "fail"
    assert "1 of 2 matches" in report.checks[0].of("numerics").reason
    assert (report.bisection.transform, report.bisection.number) == ("fuse_swiglu", 2)


def test_a_fault_that_a_later_transform_lays_bare_is_named(monkeypatch):
    """Wrong for strided inputs: all are contiguous until merge_gate_up hands it parts of one projection."""
    faulty_swiglu(monkeypatch, "strided", at=1)
    report = checked("fuse_swiglu")
    found = report.bisection
    assert (found.transform, found.number, found.matches, found.module) == ("fuse_swiglu", 2, 2, "model.layers.1.mlp")
    assert found.exposed_by.startswith("merge_") and found.exposed_by in report.whole[0].reason


@pytest.mark.exhaustive
def test_of_several_wrong_places_the_first_is_named(monkeypatch):
    scale(monkeypatch, "fuse_swiglu", 1.1, at=[1])
    scale(monkeypatch, "fuse_rope", 1.2)
    found = checked().bisection
    assert (found.transform, found.number, found.module) == ("fuse_swiglu", 2, "model.layers.1.mlp")


@pytest.mark.exhaustive
def test_a_deeper_model_takes_a_logarithm_of_runs(monkeypatch):
    """smollm3 has 4 layers: 9 norms, 15 transforms that change the graph."""
    scale(monkeypatch, "fuse_rms_norm", 1.05, at=[6])
    found = checked("fuse_rms_norm", "tiny-smollm3").bisection
    assert (found.number, found.matches) == (7, 9)
    assert found.runs <= found.bound == bound(14, 9) == 2 + 4 + 4


@pytest.mark.exhaustive
def test_in_16_bits_the_same_is_found(monkeypatch):
    scale(monkeypatch, "fuse_rms_norm", 1.1, at=[3])
    report = checked("fuse_rms_norm", dtype="bfloat16")
    assert report.bisection.number == 4 and 0.01 < report.bisection.limit < 0.04


def test_a_small_mistake_that_the_dtype_hides_is_no_reason_to_search(monkeypatch):
    scale(monkeypatch, "fuse_rms_norm", 1 + 2**-23, at=[3])
    report = checked("fuse_rms_norm")
    assert report.bisection is None and report.whole[0].verdict == "pass"


def test_a_transform_whose_matches_do_not_stand_alone_is_named_as_a_whole(monkeypatch):
    scale(monkeypatch, "insert_kv_cache", 1.1, at=[0])
    found = checked("insert_kv_cache").bisection
    assert (found.transform, found.match) == ("insert_kv_cache", "")
    assert "do not stand alone" in found.why_no_match and found.runs <= found.bound


@pytest.mark.exhaustive
def test_behind_a_change_on_purpose_the_bound_holds_too(monkeypatch):
    scale(monkeypatch, "fuse_rope", 1.1, at=[0])
    found = check("tiny-gemma-2", CheckRequest(load_config(), "quantize_linear")).bisection
    assert found.transform == "fuse_rope" and found.runs <= found.bound


@pytest.mark.exhaustive
def test_dumps_name_the_transform(monkeypatch, tmp_path):
    scale(monkeypatch, "fuse_rope", 1.1, at=[2])
    checked(save=tmp_path / "bad")
    found = checked(model=str(tmp_path / "bad")).bisection
    assert found.transform == "fuse_rope" and "check the model itself" in found.why_no_match


# ── a transform with some of its matches ────────────────────────────────────────────────────────────────────────


@pytest.mark.exhaustive
@pytest.mark.some(1)
@pytest.mark.parametrize("name", short(CHOSEN, "fuse_rope", "merge_qkv"))
def test_every_choice_of_matches_gives_the_same_results(trial, name):
    replay = TransformReplay(trial, name)
    outputs = StepLogits(trial.run, trial.state)
    after = trial.run.after(name)
    wanted, all_of_them = outputs.after(after.number - 1), outputs.after(after.number)
    counts = set()
    numbers = range(len(replay.matches))
    for size in range(len(numbers) + 1):
        for kept in combinations(numbers, size):
            gm = with_matches(replay.gm, replay.before, replay.matches, kept, replay.uses)
            present = {node.name for node in gm.graph.nodes}
            for index, match in enumerate(replay.matches):
                made = any(node in present for node in match.made)
                assert made == (index in kept), f"match {index} of {kept}"
            got = logits(gm)
            assert distance(got, wanted) < 2e-6
            counts.add(len(list(calls(gm.graph))))
            if not kept:
                assert torch.equal(got, wanted)
            if len(kept) == len(numbers):
                assert torch.equal(got, all_of_them)
    assert len(counts) > 1  # the graphs are not all the same


def test_the_graph_itself_is_left_as_it_is(trial):
    replay = TransformReplay(trial, "fuse_rope")
    text = graph_text(replay.gm.graph)
    with_matches(replay.gm, replay.before, replay.matches, [1], replay.uses)
    assert graph_text(replay.gm.graph) == text


def test_no_matches_give_back_the_graph_before(trial):
    replay = TransformReplay(trial, "fuse_rope")
    none = with_matches(replay.gm, replay.before, replay.matches, [], replay.uses)
    assert [n.name for n in none.graph.nodes] == [name for _, name, *_ in replay.before.nodes]
    every = with_matches(replay.gm, replay.before, replay.matches, range(4), replay.uses)
    assert [n.name for n in every.graph.nodes] == [n.name for n in replay.gm.graph.nodes]


def test_a_match_without_its_own_change_is_refused(trial, monkeypatch):
    """What the editor was not told of cannot be taken back, and is not guessed at."""
    unowned = ("input_ids", "position_ids")

    def planted(gm, outcome):
        first, *others = outcome.matches
        first = replace(first, successors=(*first.successors, unowned))
        return replace(outcome, matches=(first, *others))

    plant(monkeypatch, "fuse_rope", planted)
    replay = TransformReplay(trial, "fuse_rope")
    with pytest.raises(VerificationError, match="no match says so"):
        with_matches(replay.gm, replay.before, replay.matches, [0], replay.uses)
