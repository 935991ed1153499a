"""Runs on disk: what a dump holds, that its graphs run again with equal results, and bad ones."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import graft
from decode_cases import forced
from graft.base.errors import DumpError, RunMismatch, TransformOff, UnknownTransform
from graft.cli.app import app
from graft.ir.nodes import placeholders
from graft.ops.layout import HostBatch, pack
from graft.passes.config import load_config, quantize_sets
from graft.passes.dumps import MANIFEST, MARKER, RUN_FORMAT, WEIGHTS, DumpWriter
from graft.workbench.diff_runs import compare_records, diff_runs, folded
from graft.workbench.dump import dump_model
from graft.workbench.runs import open_run
from graft.workbench.stored import load_state, save_state
from marks import short

EXAMPLE = Path(__file__).parents[3] / "examples" / "transform_before_after.py"
CHANGED = {"fuse_rope", "merge_qkv", "merge_gemms"}  # without fuse_rope; what merge_qkv leaves, merge_gemms takes
T = 6


def inputs(gm):
    """T tokens of one sequence, for a graph of any stage: with a cache or without one."""
    host = HostBatch()
    host.add(range(5, 5 + T), 0, [0], 16)
    known = vars(pack(host, torch.device("cpu")))
    nodes = placeholders(gm.graph)
    texts = {
        n.name: n.meta["value_text"] if "value_text" in n.meta else str(list(n.meta["val"].shape)) for n in nodes
    }
    shapes = {name: [int(size) for size in re.findall(r"\d+(?=[,\]])", text)[-3:]] for name, text in texts.items()}
    return [known[n.name] if n.name in known else torch.zeros(2, *shapes[n.name]) for n in nodes]


def result(gm):
    with torch.no_grad():
        return torch.fx.Interpreter(gm).run(*inputs(gm))[0]


@pytest.fixture(scope="module", params=short(["llama", "qwen2"], "llama"))
def kept(request, tmp_path_factory):
    """A run with weights, and what every graph gave when it was written. Weights are merged, then quantized."""
    folder, live = tmp_path_factory.mktemp(request.param), {}
    write = DumpWriter.write

    def written(self, stage, name, gm):
        write(self, stage, name, gm)
        live[name] = result(gm)

    config = load_config(forced(), sets=quantize_sets("int8"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DumpWriter, "write", written)
        dump_model(f"tiny-{request.param}", folder, config, "float32", weights=True)
    return open_run(folder), live


def test_every_step_loads_back_and_gives_what_it_gave(kept):
    run, live = kept
    changed = [step for step in run.steps if run.report.transforms.get(step.transform)]
    applied = [s.transform for s in changed if run.report.transforms[s.transform].status == "applied"]
    assert {"merge_qkv", "insert_kv_cache", "quantize_linear"} <= set(applied)
    for step in run.steps:
        assert torch.equal(result(graft.load_dump(step.stem)), live[step.transform]), step.transform
    assert live["insert_kv_cache"].shape != live["captured"].shape  # the last token alone
    assert torch.allclose(live["insert_kv_cache"][0, -1], live["captured"][0, -1], atol=1e-4)


def test_other_weights_give_other_results(kept):
    run, live = kept
    state = run.state()
    name = next(n for n in state if n.endswith("norm.weight"))
    wrong = {**state, name: torch.nn.Parameter(state[name] * 1.01)}
    for step in (run.steps[0], run.after("insert_kv_cache")):
        assert torch.equal(result(step.graph(state)), live[step.transform])
        assert not torch.equal(result(step.graph(wrong)), live[step.transform])


def test_merged_weights_and_their_parts_are_stored_once(kept):
    run, _ = kept
    state = run.state()
    merged, part = (state[f"model.layers.0.self_attn.{n}_proj.weight"] for n in ("qkv", "q"))
    assert merged.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
    tensors = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in state.values()}
    assert (run.folder / WEIGHTS).stat().st_size < sum(tensors.values()) + 40_000


def test_weights_that_a_step_needs_and_state_lacks_are_named(kept):
    run, _ = kept
    captured = {n: t for n, t in run.state().items() if "qkv_proj" not in n}
    assert result(run.steps[0].graph(captured)) is not None
    with pytest.raises(DumpError, match=r"reads model\.layers\.0\.self_attn\.qkv_proj.* --weights"):
        run.after("merge_qkv").graph(captured)
    name = "model.norm.weight"
    with pytest.raises(DumpError, match="has shape"):
        run.steps[0].graph({**captured, name: torch.zeros(3)})
    with pytest.raises(DumpError, match="float64, the dump expects float32"):
        run.steps[0].graph({**captured, name: captured[name].double()})
    assert run.steps[0].graph().get_parameter(name).is_meta  # without state it is to be read, not run


def test_weights_that_cannot_be_read_are_told(tmp_path):
    with pytest.raises(DumpError, match="--weights writes it"):
        load_state(tmp_path)
    save_state({"a.b": torch.ones(2)}, tmp_path)
    assert torch.equal(load_state(tmp_path)["a.b"], torch.ones(2)) and len(list(tmp_path.iterdir())) == 1
    (tmp_path / WEIGHTS).write_bytes(b"x" * 20)
    with pytest.raises(DumpError, match="dump the model again"):
        load_state(tmp_path)
    writer = DumpWriter(tmp_path, state={"w": torch.ones(2)})
    with pytest.raises(DumpError, match="w is another tensor after 003_x"):
        writer.keep({"w": torch.ones(2)}, "003_x")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of one model, the second without rope, and one of another model."""
    folders = [tmp_path_factory.mktemp(name) for name in ("a", "b", "other")]
    dump_model("tiny-llama", folders[0], load_config())
    dump_model("tiny-llama", folders[1], load_config({"transforms": {"fuse_rope": {"enabled": False}}}))
    dump_model("tiny-gemma-2", folders[2], load_config())  # captured by others too
    return [open_run(folder) for folder in folders]


@pytest.mark.exhaustive
def test_the_manifest_says_what_a_run_was_made_of(runs):
    manifest = runs[0].manifest
    assert (manifest.model, manifest.dtype, manifest.device, manifest.route) == (
        "tiny-llama",
        "bfloat16",
        "meta",
        "decoder",
    )
    assert manifest.versions["graft"] == graft.__version__ and manifest.versions["torch"] == torch.__version__
    assert manifest.config["transforms.fuse_rope.enabled"] is True and manifest.config["verify"] == "structure"
    assert [step.stem.name for step in runs[0].steps] == list(manifest.steps)
    assert runs[0].steps[0].transform == "captured" and "%input_ids = input" in runs[0].steps[0].text()


def test_two_runs_differ_by_transform_and_in_the_last_graph(runs):
    diff = diff_runs(runs[0], runs[1])
    assert [(d.what, d.before, d.after) for d in diff.made_of] == [("transforms.fuse_rope.enabled", "True", "False")]
    found = {t.name: t for t in diff.transforms}
    assert set(found) == CHANGED
    assert found["merge_qkv"].matches == (2, 0) and found["merge_gemms"].matches == (0, 2)
    assert found["fuse_rope"].status == ("applied", "disabled") and found["fuse_rope"].matches == (4, 0)
    assert found["fuse_rope"].lost == ("model.layers.*.self_attn × 4 (layers 0–1)",)
    assert found["merge_qkv"].near_misses == (0, 2) and "linear layers × 2" in found["merge_qkv"].new_misses[0]
    ropes = [c for c in diff.graph.of("removed") if c.before.op == "graft.rope"]
    other = {(d.what, d.before, d.after) for c in diff.graph.of("metadata") for d in c.details}
    assert len(ropes) == 4 and other == {("made_by", "merge_qkv", "merge_gemms")}
    back = {t.name: t for t in diff_runs(runs[1], runs[0]).transforms}
    assert back["fuse_rope"].gained == found["fuse_rope"].lost
    assert back["merge_qkv"].gone_misses == found["merge_qkv"].new_misses
    assert not diff_runs(runs[0], runs[0])


def test_a_transform_that_one_run_has_not_is_told(runs):
    record = runs[0].report.transforms["fuse_rope"]
    assert compare_records("fuse_rope", None, record).status == ("absent", "applied")
    assert compare_records("fuse_rope", record, None).matches == (4, 0)
    narrowed = diff_runs(runs[0], runs[1], "fuse_rope")
    assert [t.name for t in narrowed.transforms] == ["fuse_rope"] and narrowed.graph is None
    assert "fuse_rope was off" in narrowed.note
    same = diff_runs(runs[0], runs[1], "fuse_rms_norm")
    assert not same and same.graph is not None


def test_places_fold_by_layer():
    assert folded(["m.0.a", "m.1.a", "m.3.a", "n"]) == ("m.*.a × 3 (layers 0–1, 3)", "n")
    assert folded(["m.7.a: 2 readers"]) == ("m.7.a: 2 readers",)


def test_runs_of_two_models_are_a_note_or_with_strict_an_error(runs):
    diff = diff_runs(runs[0], runs[2])
    assert diff.made_of[0].what == "model" and diff.made_of[0].after == "tiny-gemma-2" and diff.graph
    with pytest.raises(RunMismatch, match=r"tiny-gemma-2.*leave out --strict"):
        diff_runs(runs[0], runs[2], strict=True)


def damaged(run, tmp_path, change):
    folder = tmp_path / "run"
    shutil.copytree(run.folder, folder)
    change(folder)
    return folder


def set_manifest(folder, **values):
    data = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**data, **values}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / MARKER).unlink(), "is no folder of dumps"),
        (lambda f: shutil.rmtree(f), "is not a folder"),
        (lambda f: (f / MANIFEST).unlink(), "interrupted, or an older graft"),
        (lambda f: (f / "report.json").unlink(), "interrupted, or an older graft"),
        (lambda f: (f / "report.json").write_text("{"), "report.json is damaged"),
        (lambda f: (f / MANIFEST).write_text("[]"), "run.json is damaged"),
        (lambda f: (f / MANIFEST).write_text(json.dumps({"format": RUN_FORMAT, "graphs": 2})), "run.json is damaged"),
        (lambda f: set_manifest(f, format=1), "has format 1.*dump the model again"),  # other names of inputs
        (lambda f: set_manifest(f, format=9, versions={"graft": "7.0"}), "has format 9.*written by graft 7.0"),
        (lambda f: set_manifest(f, graphs=1), "graphs of format 1"),
        (lambda f: (f / "000_capture_captured.json").unlink(), "lacks 000_capture_captured.json"),
        (lambda f: set_manifest(f, steps=["../x"]), "lacks ../x.json"),
    ],
)
def test_folders_that_hold_no_run_are_told(runs, tmp_path, change, message):
    folder = damaged(runs[0], tmp_path, change)
    with pytest.raises(DumpError, match=message):
        open_run(folder)


def test_an_interrupted_run_does_not_look_like_the_one_before(runs, tmp_path):
    folder = damaged(runs[0], tmp_path, lambda _: None)
    DumpWriter.open(folder)  # a new run begins here, and goes no further
    with pytest.raises(DumpError, match="interrupted"):
        open_run(folder)


def test_graphs_that_are_none_and_transforms_that_are_not_there_are_told(runs, tmp_path):
    folder = damaged(runs[0], tmp_path, lambda f: (f / "000_capture_captured.json").write_text('{"format": 2}'))
    with pytest.raises(DumpError, match="is no graph that graft wrote"):
        open_run(folder).steps[0].graph()
    with pytest.raises(UnknownTransform, match="did you mean 'fuse_rope'"):
        runs[0].around("fuse_ropes")
    with pytest.raises(UnknownTransform, match="did you mean 'fuse_rope'"):
        diff_runs(runs[0], runs[1], "fuse_ropes")
    with pytest.raises(TransformOff, match=r"was off.*enabled=true"):
        runs[1].around("fuse_rope")


def told(*args):
    found = CliRunner().invoke(app, ["diff", *map(str, args)])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found


def test_the_command_shows_text_json_and_markdown(runs):
    a, b = runs[0].folder, runs[1].folder
    text = told(a, "--transform", "fuse_rms_norm")
    assert text.exit_code == 0 and "5 matches" in text.stdout and "layers 0–1 × 2" in text.stdout
    assert "\x1b" not in text.stdout  # NO_COLOR
    document = json.loads(told(a, "-t", "fuse_rms_norm", "--json").stdout)
    assert document["matches"] == 5 and document["graph"]["counts"]["added"] == 5
    assert "```diff" in told(a, "-t", "fuse_rms_norm", "--markdown").stdout
    assert "\nlayer 1\n" in told(a, "-t", "fuse_rms_norm", "--all").stdout
    both = told(a, b)
    assert both.exit_code == 0 and "fuse_rope: applied → disabled, matches 4 → 0" in both.stdout
    document = json.loads(told(a, b, "--json").stdout)
    assert {t["name"] for t in document["transforms"]} == CHANGED and document["graph"]["changes"]
    same = told(a, a)
    assert same.exit_code == 0 and "every transform did the same" in same.stdout and "no difference" in same.stdout


def test_the_command_colours_what_came_and_went(runs, monkeypatch):
    from rich.console import Console

    import graft.cli.show

    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setattr(graft.cli.show, "out", Console(force_terminal=True, color_system="standard"))
    text = told(runs[0].folder, "-t", "fuse_swiglu").stdout
    assert "\x1b[32m  + %swiglu" in text and "\x1b[31m  - %silu" in text and "\x1b[33m  ~ %linear" in text


def test_the_command_refuses_with_its_exit_code(runs, tmp_path):
    a, other = runs[0].folder, runs[2].folder
    for args, code, message in (
        ([a], 2, "needs --transform T"),
        ([a, "-t", "fuse_ropes"], 2, "did you mean 'fuse_rope'"),
        ([a, "-t", "fuse_rope", "--json", "--markdown"], 2, "choose one"),
        ([a, other, "--strict"], 2, "cannot be compared strictly"),
        ([tmp_path, "-t", "fuse_rope"], 1, "is no folder of dumps"),
    ):
        found = told(*args)
        assert found.exit_code == code and message in found.stderr
        assert message in found.stdout if "--json" in args else found.stdout == ""  # an error is a document too
    noted = told(a, other)
    assert noted.exit_code == 0 and "model: tiny-llama → tiny-gemma-2" in noted.stdout


def test_before_and_after_as_a_program(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--transform", "fuse_rms_norm"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.startswith("fuse_rms_norm on tiny-llama: 149 → 114 nodes, 5 added, 40 removed, 11 rewired")
    assert "layers 0–1 × 2" in printed and "graft.rms_norm(%add" in printed
