"""`graft check`: the list for a transform, and each point of it failing where it must."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch

from check_cases import LIST, capture_once, drop_meta, plant, refuse, scale
from graft.base.errors import DumpError, UnknownTransform, UsageError
from graft.models.registry import families
from graft.passes.base import Outcome
from graft.passes.config import load_config
from graft.passes.patterns import PatternTransform
from graft.passes.registry import TransformRegistry
from graft.workbench.check import CheckRequest, check, negative_tests, written
from graft.workbench.check.written import Home, home_of, in_docs, listed, registered
from marks import left_out

CONFIG = load_config()
NAME = "fuse_rms_norm"


@pytest.fixture(scope="module", autouse=True)
def captured():
    with pytest.MonkeyPatch.context() as patch:
        capture_once(patch)
        yield


def checked(transform=NAME, model="tiny-llama", config=CONFIG, **options):
    return check(model, CheckRequest(config, transform, **options))


def line(report, name, transform=NAME):
    return next(c for c in report.checks if c.name == transform).of(name)


def verdicts(report, transform=NAME):
    return {line.check: line.verdict for line in next(c for c in report.checks if c.name == transform).lines}


def failed(report, transform=NAME):
    return {check for check, verdict in verdicts(report, transform).items() if verdict == "fail"}


@pytest.mark.exhaustive  # the short run: as a command, in test_check_cli.py
def test_a_good_transform_passes_every_point():
    report = checked()
    assert verdicts(report) == dict.fromkeys(LIST, "pass")
    assert report.ok and report.whole[0].verdict == "pass" and report.bisection is None
    assert line(report, "matches").reason == "5 = 2*L + 1 (L = 2)"
    assert "SUMMARY] matches=5" in report.checks[0].summary


@pytest.mark.exhaustive
def test_all_that_are_on_are_checked_in_their_order():
    report = checked("")
    names = [c.name for c in report.checks]
    assert report.ok and names.index("fuse_rms_norm") < names.index("merge_qkv") < names.index(
        "fuse_norm_into_matvec"
    )
    assert "quantize_linear" not in names  # off
    assert sum(len(c.lines) for c in report.checks) == len(names) * len(LIST)
    # what is for a GPU is tried here with its references, and counted as on a GPU
    assert line(report, "matches", "fuse_norm_into_matvec").reason == "5 = 2*L + 1 (L = 2)"
    assert line(report, "matches", "fuse_moe").verdict == "pass"
    assert (
        line(report, "numerics", "fuse_moe").verdict == "skip"
        and "topk" in line(report, "numerics", "fuse_moe").reason
    )
    assert "layout in the cache" in line(report, "numerics", "fuse_rope_kv_write").reason


def test_devices_that_a_user_named_are_kept():
    """As the note says of those that are tried all the same."""
    config = load_config(sets=["transforms.fuse_norm_into_matvec.devices=[cuda]"])
    report = checked("fuse_norm_into_matvec", config=config)
    found = line(report, "matches", "fuse_norm_into_matvec")
    assert found.verdict == "skip" and "skipped" in found.reason
    (note,) = report.notes
    assert "--set transforms." in note and ".devices=[cuda]" in note and "fuse_norm_into_matvec" not in note


@pytest.mark.exhaustive
def test_what_is_for_a_gpu_can_be_left_out():
    report = checked("dispatch_linear", other_devices=False)
    assert line(report, "matches", "dispatch_linear").verdict == "skip" and not report.notes


@pytest.mark.exhaustive
def test_a_transform_that_is_off_is_switched_on():
    found = line(checked("quantize_linear"), "matches", "quantize_linear")
    assert found.verdict == "skip" and re.match(r"[1-9]\d*; it is off by default", found.reason)


def test_numbers_that_change_on_purpose_are_held_to_what_they_became():
    report = checked("quantize_linear")
    assert report.ok and "quantize_linear changes numbers on purpose" in report.whole[0].reason


@pytest.mark.parametrize("transform", ["fuse_layer_norm", "fuse_moe", "fuse_rope_into_attention"])
def test_without_a_model_one_is_taken_that_matches(transform):
    from graft.workbench.check.request import usual_model

    taken = families()[usual_model(transform).removeprefix("tiny-")]
    assert transform in {*taken.expect, *taken.expect_gpu} and usual_model("") == "tiny-llama"


@pytest.mark.exhaustive
def test_a_model_of_real_size_is_checked_without_weights(monkeypatch):
    """Two layers of a model that is not called tiny."""
    llama = families()["llama"]
    monkeypatch.setitem(llama.models, "large", llama.tiny)
    report = checked(model="large")
    assert verdicts(report) == dict.fromkeys(LIST, "pass") and report.device == "meta"
    assert report.whole[0].verdict == "skip" and "would be random" in report.whole[0].reason


# ── each point, failing ─────────────────────────────────────────────────────────────────────────────────────────


def test_names_that_differ_fail(tmp_path):
    home = home_of(NAME)
    assert registered(NAME, CONFIG, home).verdict == "pass"
    other = registered(NAME, CONFIG, replace(home, file=tmp_path / "norms.py"))
    assert other.verdict == "fail" and "norms.py" in other.reason
    bare = replace(CONFIG, transforms={})
    assert "no key transforms.fuse_rms_norm" in registered(NAME, bare, home).reason


def test_a_transform_that_is_not_listed_fails(monkeypatch, tmp_path):
    defaults = tmp_path / "default.yaml"
    defaults.write_text("transforms: {fuse_rope: {stage: match, enabled: false}}")
    home = home_of(NAME)
    monkeypatch.setattr(written, "DEFAULTS", defaults)
    assert listed(NAME, CONFIG, home).verdict == "fail"
    assert listed("fuse_rope", CONFIG, home).reason == "default.yaml, stage match, off"
    plugin = replace(home, library=False)
    assert listed(NAME, CONFIG, plugin).verdict == "pass"  # a plugin's is listed where its configuration is


def test_documentation_that_is_missing_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(TransformRegistry.get(NAME), "__doc__", "RMSNorm.\n\nbefore: a\nafter: b\n")
    assert "the numerics it keeps" in line(checked(), "docstring").reason
    docs = tmp_path / "fusions.md"
    docs.write_text("fuse_rms_norm_and_more\n")
    home = Home(tmp_path / "x.py", tmp_path, True, None, docs)
    assert in_docs(NAME, home).verdict == "fail"
    docs.write_text("first\n`fuse_rms_norm` finds norms\n")
    assert in_docs(NAME, home).reason == "docs/fusions.md:2"
    assert in_docs(NAME, replace(home, docs=None)).verdict == "skip"


TESTS = """
from graft.testing import assert_fuses, {helper}
NAME = "{named}"
def helper(case):
    {helper}(case, (), NAME)
def test_{title}():
    helper(1)
def test_other():
    assert_fuses(1, (), "fuse_rms_norm")
"""


@pytest.mark.parametrize(
    ("helper", "named", "title", "verdict"),
    [
        ("assert_not_fuses", NAME, "one", "pass"),
        ("assert_refused_or_harmless", NAME, "one", "pass"),
        ("assert_not_fuses", "fuse_rope", "one", "fail"),  # holds back another transform
        ("assert_fuses", NAME, "one", "fail"),  # says what it does, not what it must not do
        ("try_transform", NAME, "a_second_reader_is_refused", "pass"),  # with assertions of its own
    ],
)
def test_tests_that_must_not_fuse_are_looked_for(tmp_path, helper, named, title, verdict):
    (tmp_path / "test_norms.py").write_text(TESTS.format(helper=helper, named=named, title=title))
    (tmp_path / "test_broken.py").write_text(f'"{NAME}" is no (Python')
    found = negative_tests.negative_line(NAME, tmp_path)
    assert found.verdict == verdict
    assert (f"test_norms.py::test_{title}" in found.reason) == (verdict == "pass")


def test_without_tests_beside_it_that_point_is_skipped(tmp_path):
    assert negative_tests.negative_line(NAME, None).verdict == "skip"
    report = checked(tests=tmp_path)
    assert failed(report) == {"negative tests"} and not report.ok


def test_every_transform_of_the_library_has_its_negative_tests():
    tests = home_of(NAME).tests
    missing = [n for n in CONFIG.transforms if negative_tests.negative_tests(n, tests) is None]
    assert missing == []
    kit = [n for n in CONFIG.transforms if "kit" in negative_tests.negative_tests(n, tests).how]
    anywhere = {n for n, config in CONFIG.transforms.items() if not hasattr(config, "devices")}
    assert {n for n in anywhere if issubclass(TransformRegistry.get(n), PatternTransform)} <= set(kit)


def test_a_match_that_is_missing_fails(monkeypatch):
    refuse(monkeypatch, NAME, "layers.1.input_layernorm")
    report = checked()
    assert failed(report) == {"matches"}
    assert line(report, "matches").reason == "4, and llama expects 5 = 2*L + 1 (L = 2)"


def test_fewer_matches_because_another_is_off_are_no_failure():
    config = load_config(sets=[f"transforms.{NAME}.enabled=false"])
    found = line(checked("fuse_add_rms_norm", config=config), "matches", "fuse_add_rms_norm")
    assert found.verdict == "skip" and f"with {NAME}, which is off here" in found.reason


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [(1.0, "pass"), (1.0001, "fail"), left_out((1.1, "fail")), left_out((float("nan"), "fail"))],
)
def test_a_replacement_that_computes_something_else_fails(monkeypatch, factor, verdict):
    scale(monkeypatch, NAME, factor, at=[2])
    report = checked()
    assert line(report, "numerics").verdict == verdict
    if verdict == "fail":
        assert line(report, "numerics").reason.startswith("1 of 5 matches: the replacement at %mul")
        assert "allowed" in line(report, "numerics").reason


@pytest.mark.parametrize(
    ("key", "lost"),
    [("nn_module_stack", "module"), left_out(("stack_trace", "source line")), left_out(("made_by", ""))],
)
def test_metadata_that_is_lost_fails(monkeypatch, key, lost):
    drop_meta(monkeypatch, NAME, key)
    report = checked()
    assert failed(report) == {"metadata"} and lost in line(report, "metadata").reason
    assert "4 more" in line(report, "metadata").reason


@pytest.mark.exhaustive
def test_a_transform_that_raises_fails_and_the_rest_is_checked(monkeypatch):
    def fall(gm, outcome):
        raise ValueError("planted")

    plant(monkeypatch, NAME, fall)
    report = checked("")
    assert failed(report) == {"matches"} and "planted" in line(report, "matches").reason
    assert line(report, "matches", "fuse_rope").verdict == "pass"


def test_an_edit_that_is_reported_as_nothing_is_blamed_on_its_transform(monkeypatch):
    """It is taken back by name; once another transform was blamed for the results."""

    def silent(gm, outcome):
        changed = next(node for node in gm.graph.nodes if node.target is torch.ops.aten.silu.default)
        changed.target = torch.ops.aten.relu.default
        return Outcome(reason="nothing here")

    plant(monkeypatch, "fuse_layer_norm", silent)  # it finds nothing in this model
    report = checked("fuse_layer_norm")
    told = line(report, "matches", "fuse_layer_norm")
    assert told.verdict == "fail" and "no match" in told.reason and "silu" in told.reason
    assert report.whole[0].verdict == "pass"  # nothing of it is left


# ── folders of dumps ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def run(tmp_path_factory, captured):
    folder = tmp_path_factory.mktemp("run")
    checked(save=folder)  # the dumps are of all transforms; what is tried numerically is one
    return folder


@pytest.mark.exhaustive
def test_a_folder_of_dumps_is_checked_as_it_is(run):
    report = checked(model=str(run))
    assert verdicts(report) == dict.fromkeys(LIST, "pass") | {"ops": "skip"} and report.whole[0].verdict == "pass"
    assert len(checked("", model=str(run)).checks) > 15


@pytest.mark.exhaustive
def test_dumps_without_numeric_checks_or_weights_say_so(tmp_path):
    from graft.workbench.dump import dump_model

    dump_model("tiny-llama", tmp_path, CONFIG, "float32")
    report = checked(model=str(tmp_path))
    assert report.ok
    assert "verify=matches" in line(report, "numerics").reason and report.whole[0].verdict == "skip"


@pytest.mark.some(1)
@pytest.mark.parametrize("part", ["txt", "json"])
def test_a_dump_that_shows_nothing_or_is_damaged_fails(run, tmp_path, part):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    before, after = sorted(folder.glob(f"00[23]_*.{part}"))
    if part == "txt":
        after.write_text(before.read_text().replace("fuse_layer_norm", NAME))
    else:
        after.write_text(after.read_text()[:-400])
    report = checked(model=str(folder))
    assert verdicts(report)["metadata"] == ("pass" if part == "txt" else "skip")
    found = line(report, "dumps")
    assert found.verdict == "fail" and ("although it matched" in found.reason or "not JSON" in found.reason)


def test_what_is_no_dump_or_of_another_version_is_told(run, tmp_path):
    with pytest.raises(DumpError, match="neither a folder of dumps"):
        checked(model=str(tmp_path))
    folder = tmp_path / "old"
    shutil.copytree(run, folder)
    manifest = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(manifest | {"format": 0}))
    for options in ({"model": str(folder)}, {"baseline": folder}):
        with pytest.raises(DumpError, match=r"has format 0 .*dump the model again"):
            checked(**options)


def test_a_transform_that_is_not_there_is_told_with_suggestions():
    with pytest.raises(UnknownTransform, match="did you mean 'fuse_rms_norm'"):
        checked("fuse_rmsnorm")
    with pytest.raises(UnknownTransform, match="needs --config"):
        checked(config=replace(CONFIG, transforms={}))


def test_requests_that_contradict_themselves_are_refused(run, tmp_path):
    with pytest.raises(UsageError, match="folder of dumps already"):
        checked(model=str(run), save=tmp_path / "new")
    with pytest.raises(UsageError, match="cannot be the baseline"):
        checked(baseline=run, save=run)
    with pytest.raises(UsageError, match="--note is about one transform"):
        checked("", note=tmp_path / "note.md")
