"""A run against a saved one: every class of change, planted."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from check_cases import capture_once, drop_meta, refuse, scale
from graft.base.errors import BaselineMismatch, DumpError, UsageError
from graft.passes.config import load_config
from graft.passes.dumps import OUTPUTS, DumpWriter
from graft.workbench.check import CheckRequest, check
from graft.workbench.check.outputs import distance, kind_of_inputs, off_text
from graft.workbench.check.scenario import ROWS
from graft.workbench.dump import dump_model
from marks import left_out

CONFIG = load_config()
# the first stage alone, where a run of every transform is not needed
SHORT = load_config(
    {"transforms": {n: {"enabled": False} for n, s in CONFIG.transforms.items() if s.stage != "match"}}
)
NAME = "fuse_rms_norm"
LAST = "fuse_rope_into_attention"


@pytest.fixture(scope="module", autouse=True)
def captured():
    with pytest.MonkeyPatch.context() as patch:
        capture_once(patch)
        yield


@pytest.fixture(scope="module")
def saved(captured, tmp_path_factory):
    folder = tmp_path_factory.mktemp("baseline")
    checked(save=folder)
    return folder


def checked(transform="", model="tiny-llama", config=CONFIG, **options):
    return check(model, CheckRequest(config, transform, **options))


def rewrite(folder, change=lambda _, value: value, inputs=None):
    """The results that were saved, others by now."""
    tensors = {name: change(name, value).contiguous() for name, value in load_file(folder / OUTPUTS).items()}
    save_file(tensors, folder / OUTPUTS, {"inputs": json.dumps(inputs or kind_of_inputs())})


def kinds(report):
    """The classes that are not `unchanged`, by transform."""
    return {c.transform: c.kinds for c in report.changes if c.kinds != ("unchanged",)}


def change(report, name=NAME):
    return next(c for c in report.changes if c.transform == name)


def test_the_same_run_is_unchanged(saved):
    report = checked(baseline=saved)
    assert report.ok and kinds(report) == {} and len(report.changes) == len(report.checks) > 15
    assert {c.drift for c in report.changes} == {0.0}
    assert report.baseline == str(saved) and report.notes[-1].startswith("for another device, tried on the cpu")


def test_the_models_name_and_dtype_come_from_the_baseline(saved):
    report = checked(NAME, model="", baseline=saved)
    assert (report.model, report.dtype) == ("tiny-llama", "float32") and kinds(report) == {}


def test_match_loss(saved, monkeypatch):
    refuse(monkeypatch, NAME, "layers.1.input_layernorm")
    report = checked(baseline=saved)
    found = change(report)
    assert "match loss" in found.kinds and found.bad and not report.ok
    assert found.reason.startswith("matches 5 → 4: not any more at model.layers.1.input_layernorm")
    assert "planted: it is refused here" in found.reason
    # what builds on it loses its match too, a linear layer is by itself then; nothing else changes
    built_on_it = {"fuse_add_rms_norm", "fuse_norm_into_matvec", "fuse_residual_into_matvec", "dispatch_linear"}
    assert kinds(report).keys() == {NAME, *built_on_it}
    assert "match loss" not in change(report, "fuse_rope").kinds


@pytest.mark.exhaustive
def test_match_gain(saved, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        refuse(patch, NAME, "layers.1.input_layernorm")
        checked(NAME, save=tmp_path / "fewer")
    report = checked(NAME, baseline=tmp_path / "fewer")
    assert "match gain" in change(report).kinds and not change(report).bad and report.ok
    assert "matches 4 → 5: new at model.layers.1.input_layernorm" in change(report).reason


def test_metadata_loss(saved, monkeypatch):
    drop_meta(monkeypatch, NAME, "stack_trace")
    report = checked(baseline=saved, config=SHORT)
    assert change(report).kinds == ("metadata loss",) and change(report).bad and not report.ok
    assert "5 more than before" in change(report).reason and "source line" in change(report).reason
    assert change(report, "fuse_rope").kinds == ("unchanged",)


@pytest.mark.exhaustive
def test_metadata_that_was_lost_before_is_no_loss_since(tmp_path, monkeypatch):
    drop_meta(monkeypatch, NAME, "stack_trace")
    checked(NAME, save=tmp_path / "poor")
    report = checked(NAME, baseline=tmp_path / "poor")
    assert kinds(report) == {} and not report.ok  # the list says no all the same


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("factor", "dtype", "kind"),
    [
        (1 + 2**-22, "float32", "numeric drift acceptable"),
        (1.0001, "float32", "numeric drift not acceptable"),
        left_out((1.1, "float32", "numeric drift not acceptable")),
        left_out((float("nan"), "float32", "numeric drift not acceptable")),
        left_out((1.005, "bfloat16", "numeric drift acceptable")),
    ],
)
def test_numeric_drift(saved, tmp_path, monkeypatch, factor, dtype, kind):
    folder = saved
    if dtype != "float32":
        folder = tmp_path / "baseline"
        checked(NAME, save=folder, dtype=dtype, config=SHORT)
    scale(monkeypatch, NAME, factor, at=[4])
    report = checked(baseline=folder, dtype=dtype, config=SHORT)
    found = change(report)
    assert found.kinds == (kind,) and found.bad == ("not" in kind) and found.drift > 0
    assert "is allowed" in found.reason
    # later transforms inherit it, and it is not held against them
    assert [name for name, classes in kinds(report).items() if any("drift" in c for c in classes)] == [NAME]
    assert change(report, "fuse_layer_norm").drift == 0 and change(report, "fuse_rope").drift > 0


@pytest.mark.exhaustive
def test_drift_of_two_transforms_is_told_apart(saved, monkeypatch):
    scale(monkeypatch, NAME, 1.01, at=[4])
    scale(monkeypatch, "fuse_swiglu", 1.3, at=[1])
    report = checked(baseline=saved, config=SHORT)
    drifted = {name for name, classes in kinds(report).items() if "numeric drift not acceptable" in classes}
    assert drifted == {NAME, "fuse_swiglu"}


def test_several_classes_of_one_transform_are_all_told(saved, monkeypatch):
    refuse(monkeypatch, NAME, "layers.0.input_layernorm")
    drop_meta(monkeypatch, NAME)
    scale(monkeypatch, NAME, 1.1, at=[0])
    assert change(checked(NAME, baseline=saved)).kinds == (
        "match loss",
        "metadata loss",
        "numeric drift not acceptable",
    )


@pytest.mark.exhaustive
def test_a_transform_that_was_switched_off_lost_its_matches(saved):
    config = load_config(sets=["transforms.fuse_rope.enabled=false"])
    report = checked("fuse_rms_norm", config=config, baseline=saved)
    assert kinds(report) == {}
    assert "since the baseline transforms.fuse_rope.enabled: True → False" in report.notes
    report = checked(config=config, baseline=saved)
    assert change(report, "fuse_rope").kinds == ("match loss",) and not report.ok
    assert change(report, "fuse_rope").reason.startswith("matches 4 → 0, applied → disabled")
    assert next(iter(kinds(report))) == "fuse_rope"  # the cause comes first
    assert "match loss" in change(report, "merge_qkv").kinds


@pytest.mark.exhaustive
def test_a_transform_that_is_gone_lost_its_matches(saved):
    gone = replace(CONFIG, transforms={n: s for n, s in CONFIG.transforms.items() if n != "fuse_swiglu"})
    gone = replace(gone, transforms={n: replace(s, before=()) for n, s in gone.transforms.items()})
    report = checked(config=gone, baseline=saved)
    assert change(report, "fuse_swiglu").reason.startswith("matches 2 → 0, applied → absent")


# ── what a baseline holds ───────────────────────────────────────────────────────────────────────────────────────


def test_results_are_those_of_when_it_was_saved(saved, tmp_path):
    """A kernel that changed since would hide itself if the old graph were run again."""
    folder = tmp_path / "kept"
    shutil.copytree(saved, folder)
    tensors = load_file(folder / OUTPUTS)
    assert {tensor.shape for tensor in tensors.values()} == {(1, len(ROWS), 128)} and LAST in tensors
    rewrite(folder, lambda name, value: value * 1.01 if name != "captured" else value)
    report = checked(NAME, baseline=folder)
    assert change(report).kinds == ("numeric drift not acceptable",) and not any("results" in n for n in report.notes)


def test_results_of_another_shape_are_told(saved, tmp_path):
    """Of the captured graph they are those of another model; after a transform they are its doing."""
    folder = tmp_path / "captured"
    shutil.copytree(saved, folder)
    rewrite(folder, lambda _, value: value[..., :64])
    told = r"tiny-llama with results float32 \[1, 9, 64\], but tiny-llama with results float32 \[1, 9, 128\] is"
    with pytest.raises(BaselineMismatch, match=told):
        checked(NAME, baseline=folder, config=SHORT)
    folder = tmp_path / "after"
    shutil.copytree(saved, folder)
    rewrite(folder, lambda name, value: value if name == "captured" else value[:, :1])
    report = checked(NAME, baseline=folder, config=SHORT)
    assert change(report).kinds == ("numeric drift not acceptable",) and not report.ok
    assert "results are float32 [1, 9, 128] and not float32 [1, 1, 128]" in change(report).reason


@pytest.mark.parametrize(("factor", "text"), [(1.25, "off by 2.0e-01"), (float("nan"), "off by inf")])
def test_results_that_were_off_before_any_transform_are_told(saved, tmp_path, factor, text):
    folder = tmp_path / "kept"
    shutil.copytree(saved, folder)
    rewrite(folder, lambda _, value: value * factor)
    report = checked(NAME, baseline=folder, config=SHORT)
    assert change(report).kinds == ("unchanged",)  # not its doing
    assert f"since the baseline the captured graph's own results: {text} of the largest" in " ".join(report.notes)


@pytest.mark.exhaustive
def test_dumps_with_weights_are_a_baseline_too(tmp_path):
    dump_model("tiny-llama", tmp_path, CONFIG, "float32", weights=True)
    report = checked(NAME, baseline=tmp_path)
    assert change(report).kinds == ("unchanged",) and change(report).drift == 0


@pytest.mark.exhaustive
def test_dumps_without_weights_compare_all_but_numbers(tmp_path, monkeypatch):
    dump_model("tiny-llama", tmp_path, CONFIG, "float32")
    refuse(monkeypatch, NAME, "model.norm")
    report = checked(NAME, baseline=tmp_path)
    assert change(report).kinds == ("match loss",) and change(report).drift is None
    assert any(note.startswith("numbers were not compared") and "--weights" in note for note in report.notes)


def test_results_of_other_inputs_are_not_compared(saved, tmp_path):
    folder = tmp_path / "kept"
    shutil.copytree(saved, folder)
    rewrite(folder, inputs=kind_of_inputs() | {"steps": [[[0, 0, 8]]]})  # as many tokens, in other steps
    report = checked(NAME, baseline=folder, config=SHORT)
    assert change(report).drift is None
    text = f"the results in {folder} are of other inputs than these; save the baseline again"
    assert f"numbers were not compared: {text}" in report.notes


def test_a_later_dump_into_the_folder_takes_the_results_away(saved, tmp_path):
    folder = tmp_path / "kept"
    shutil.copytree(saved, folder)
    DumpWriter.open(folder)
    assert not (folder / OUTPUTS).exists()


# ── baselines that cannot be compared with ──────────────────────────────────────────────────────────────────────


@pytest.mark.exhaustive
def test_a_baseline_of_another_model_or_dtype_is_refused(saved):
    with pytest.raises(BaselineMismatch, match="a run of tiny-llama, but tiny-qwen2 is checked; check that model"):
        checked(NAME, "tiny-qwen2", baseline=saved)
    with pytest.raises(BaselineMismatch, match="tiny-llama in float32, but tiny-llama in bfloat16 is checked"):
        checked(NAME, dtype="bfloat16", baseline=saved)
    assert issubclass(BaselineMismatch, UsageError)  # exit code 2


def test_a_folder_that_is_no_baseline_is_told_before_any_work(saved, tmp_path, monkeypatch):
    from graft.workbench.check import checklist

    monkeypatch.setattr(checklist, "try_model", lambda *_, **__: pytest.fail("a model was run"))
    with pytest.raises(DumpError, match="is not a folder"):
        checked(baseline=tmp_path / "none")
    with pytest.raises(DumpError, match="is no folder of dumps"):
        checked(baseline=tmp_path)
    folder = tmp_path / "kept"
    shutil.copytree(saved, folder)
    (folder / OUTPUTS).write_bytes(b"x" * 40)
    with pytest.raises(DumpError, match="save the baseline again"):
        checked(baseline=folder)


def test_a_baseline_of_a_checkpoint_needs_its_path(saved, tmp_path):
    folder = tmp_path / "kept"
    shutil.copytree(saved, folder)
    manifest = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(manifest | {"model": "my-checkpoint"}))
    with pytest.raises(UsageError, match="my-checkpoint, which is no registry name; name it with --model"):
        checked(NAME, model="", baseline=folder)


def test_distances():
    one = torch.tensor([[[1.0, -2.0]], [[3.0, 4.0]]]).reshape(1, 2, 2)
    assert distance(one, one) == 0
    assert distance(one + 0.04, one) == pytest.approx(0.01)
    for other in (one.double(), one[..., :1], one[:, -1:]):  # every graph gives the same rows
        assert distance(other, one) == distance(one, other) == float("inf")
    assert off_text(one[:, -1:], one) == "float32 [1, 1, 2] and not float32 [1, 2, 2]"
    assert off_text(one.double(), one) == "float64 [1, 2, 2] and not float32 [1, 2, 2]"
    assert off_text(one + 0.04, one) == "off by 1.0e-02 of the largest"
    for wrong in (float("nan"), float("inf")):
        assert distance(one.index_fill(1, torch.tensor(0), wrong), one) == float("inf")
    nan = one * float("nan")
    assert distance(nan, nan) == float("inf")  # what is not a number shows nothing
