"""`graft check` as a command: exit codes, forms of output, the note, every family, plugins."""

from __future__ import annotations

import json
import re
import sys

import pytest
from typer.testing import CliRunner

from check_cases import LIST, capture_once, drop_meta, scale
from graft.cli.app import app
from graft.models import registry
from graft.passes.registry import TransformRegistry
from graft.workbench.check import all_models

NAME = "fuse_rms_norm"
ONE = ("--dtype", "float32")  # that results are compared in others as well is held by the second test


@pytest.fixture(scope="module", autouse=True)
def captured():
    with pytest.MonkeyPatch.context() as patch:
        capture_once(patch)
        yield


def graft(*args, code=0):
    done = CliRunner().invoke(app, ["check", *map(str, args)])
    assert done.exit_code == code, done.output
    return done


def test_a_good_transform_ends_with_0():
    lines = graft(NAME, *ONE).stdout.splitlines()
    assert lines[0] == f"{NAME} on tiny-llama (float32, cpu): {len(LIST)} pass"
    assert [line.split("  ")[2] for line in lines[1 : len(LIST) + 2]] == [*LIST, "end to end"]
    assert re.fullmatch(r"nothing failed, \d+\.\d s", lines[-1])


@pytest.mark.exhaustive  # the short run: test_json_is_one_document
def test_a_wrong_one_ends_with_1_and_says_where(monkeypatch):
    scale(monkeypatch, NAME, 1.1, at=[3])
    out = graft(NAME, code=1).stdout
    assert "  fail  numerics        1 of 5 matches: the replacement at %mul" in out
    assert f"first bad transform: {NAME}; match 4 of 5: %mul_" in out and "runs of at most" in out
    assert "  fail  in bfloat16     " in out and "  fail  in float16      " in out  # the results in these dtypes, too
    assert out.splitlines()[-1].startswith("4 failed")


@pytest.mark.exhaustive
def test_all_of_them_are_a_line_each(monkeypatch):
    drop_meta(monkeypatch, "fuse_swiglu")
    out = graft(code=1).stdout
    assert re.search(r"pass  fuse_rms_norm +5 matches\n", out)
    assert re.search(r"pass  fuse_moe +0 matches +skipped dumps, numerics, ops, metadata: .*aten.topk\n", out)
    assert "fail  fuse_swiglu" in out and "fail  fuse_swiglu: metadata" in out


def test_json_is_one_document(monkeypatch, tmp_path):
    graft(NAME, *ONE, "--save-baseline", tmp_path / "kept")
    scale(monkeypatch, NAME, float("nan"), at=[0])
    done = graft(NAME, *ONE, "--baseline", tmp_path / "kept", "--json", code=1)
    found = json.loads(done.stdout, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    assert (found["model"], found["ok"], found["dtype"]) == ("tiny-llama", False, "float32")
    assert [line["check"] for line in found["transforms"][0]["lines"]] == LIST
    assert found["changes"][0]["kinds"] == ["numeric drift not acceptable"] and found["changes"][0]["drift"] == "inf"
    assert found["bisection"]["transform"] == NAME and found["bisection"]["number"] == 1
    assert any("numerics" in text for text in found["failures"])


@pytest.mark.exhaustive
def test_a_baseline_is_saved_and_compared_with(monkeypatch, tmp_path):
    out = graft(NAME, "--save-baseline", tmp_path / "kept").stdout
    assert f"compare with --baseline {tmp_path / 'kept'}" in out
    assert f"  unchanged: {NAME}\n" in graft(NAME, "--baseline", tmp_path / "kept").stdout
    refused = graft("--model", tmp_path / "kept", "--set", "transforms.fuse_rope.enabled=false", code=2)
    assert "folder of dumps, which --set cannot change" in refused.stderr
    scale(monkeypatch, NAME, 1 + 2**-22, at=[4])
    out = graft(NAME, "--baseline", tmp_path / "kept").stdout  # within the dtype's tolerance: no failure
    assert f"  {NAME}: numeric drift acceptable: results are off by" in out


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["fuse_rmsnorm"], 2, "did you mean 'fuse_rms_norm'"),
        ([NAME, "--model", "tiny-lama"], 2, "did you mean 'tiny-llama'"),
        ([NAME, "--model", "{tmp}"], 1, "neither a folder of dumps"),
        ([NAME, "--baseline", "{tmp}"], 1, "is no folder of dumps"),
        ([NAME, "--baseline", "{tmp}/none"], 1, "is not a folder"),
        ([NAME, "--tests", "{tmp}/none"], 2, "is not a folder"),
        ([NAME, "--note", "{tmp}"], 2, "cannot be written"),
        (["--note", "{tmp}/note.md"], 2, "name it: graft check TRANSFORM"),
        (["--all-models", "--model", "tiny-llama"], 2, "--model is about one model"),
        (["--all-models", "--baseline", "{tmp}"], 2, "--baseline is about one model"),
        ([NAME, "--set", "transforms.nothing.enabled=true"], 2, "unknown transform 'nothing'"),
        ([NAME, "--dtype", "float3"], 2, "unknown dtype"),
    ],
)
def test_bad_requests_get_one_clear_line(tmp_path, args, code, text):
    done = graft(*[arg.format(tmp=tmp_path) for arg in args], code=code)
    assert text in done.stderr and done.stderr.count("\n") == 1 and not done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
def test_a_baseline_of_another_model_is_a_usage_error(tmp_path):
    graft(NAME, "--save-baseline", tmp_path / "kept")
    done = graft(NAME, "--model", "tiny-qwen2", "--baseline", tmp_path / "kept", code=2)
    assert "is a run of tiny-llama, but tiny-qwen2 is checked" in done.stderr


@pytest.mark.exhaustive
def test_every_family_is_in_one_document(monkeypatch):
    some = {name: registry.families()[name] for name in ("llama", "gpt2")}
    monkeypatch.setattr(all_models, "families", lambda: some)
    found = json.loads(graft(NAME, "--all-models", "--json").stdout)
    assert found["ok"] and [report["model"] for report in found["models"]] == ["tiny-llama", "tiny-gpt2"]


@pytest.mark.exhaustive
def test_every_family_is_a_row(monkeypatch):
    some = {name: registry.families()[name] for name in ("llama", "gpt2")}
    monkeypatch.setattr(all_models, "families", lambda: some)
    lines = graft(NAME, "--all-models").stdout
    assert re.search(r"tiny-llama +│ +10 +│ +0 +│ +0 +│ 5 = 2\*L \+ 1 \(L = 2\) +│ +pass", lines)
    assert re.search(r"tiny-gpt2 .* none: its norms are LayerNorm", lines)
    scale(monkeypatch, NAME, 1.1)
    assert "fail  tiny-llama: fuse_rms_norm: numerics: 5 of 5" in graft(NAME, "--all-models", code=1).stdout


# ── the note ────────────────────────────────────────────────────────────────────────────────────────────────────

SECTIONS = [
    "Candidate", "Path", "Rationale", "Graph validation", "Summary before and after", "Tests", "Open risks",
]  # fmt: skip


def sections(text):
    parts = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.exhaustive
def test_the_note_is_filled_in_from_the_run(tmp_path):
    graft(NAME, "--save-baseline", tmp_path / "kept")
    file = tmp_path / "note.md"
    assert f"the note is in {file}" in graft(NAME, "--baseline", tmp_path / "kept", "--note", file).stdout
    text = file.read_text()
    assert text.startswith("# fuse_rms_norm on tiny-llama: accepted\n")
    found = sections(text)
    assert list(found) == SECTIONS and all(body.strip() for body in found.values())
    assert "after:   %y = graft.rms_norm(%x, %weight, eps)" in found["Candidate"]
    assert "model.layers.*.input_layernorm × 2 (layers 0–1)" in found["Candidate"]
    assert "`graft.rms_norm` × 5" in found["Path"] and "triton (triton)" in found["Path"]
    assert re.search(r"\| 1 \| \d+ → \d+ \|", found["Rationale"]) and "Numerics: bitwise" in found["Rationale"]
    assert all(f"| {name} | pass |" in found["Graph validation"] for name in LIST)
    assert "| `aten.rsqrt` | 5 | 0 |" in found["Summary before and after"]
    assert "fuse_rms_norm: **unchanged**" in found["Summary before and after"]
    assert (
        "unit/passes/library/test_must_not_fuse.py::test_changed" in found["Tests"]
        and "python -m pytest tests/unit/" in found["Tests"]
    )
    assert "no kernel ran on a GPU" in found["Open risks"] and "--all-models" in found["Open risks"]
    assert list(tmp_path.glob(".note*")) == []


@pytest.mark.exhaustive
def test_the_note_of_a_wrong_transform_says_no(monkeypatch, tmp_path):
    scale(monkeypatch, "fuse_rope", 1.1, at=[2])
    graft("fuse_rope", *ONE, "--note", tmp_path / "note.md", code=1)
    text = (tmp_path / "note.md").read_text()
    found = sections(text)
    assert text.startswith("# fuse_rope on tiny-llama: not accepted")
    assert "First bad transform: `fuse_rope` (match 3 of 4" in found["Graph validation"]
    assert "- fails: fuse_rope: numerics: 1 of 4 matches" in found["Open risks"]
    assert "No baseline was given" in found["Summary before and after"]


@pytest.mark.exhaustive
def test_the_note_of_a_transform_that_matches_nowhere_says_why(tmp_path):
    graft("fuse_moe", "--model", "tiny-llama", "--note", tmp_path / "note.md")
    found = sections((tmp_path / "note.md").read_text())
    assert "It matched nowhere: the graph has no aten.topk." in found["Candidate"]
    assert "not checked: numerics" in found["Open risks"]


# ── plugins ─────────────────────────────────────────────────────────────────────────────────────────────────────

PLUGIN = '''
import torch
from torch import Tensor
from graft.passes.patterns import PatternTransform, Rewrite
from graft.passes.registry import TransformRegistry


def found(x: Tensor, cap: float) -> Tensor:
    return torch.tanh(x / cap) * cap


def made(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x * (1.0 / cap))


@TransformRegistry.register("{name}")
class Cap(PatternTransform):
    """Divides once.

    before: %y = mul(tanh(div(%x, cap)), cap)
    after:  %y = mul(tanh(mul(%x, 1 / cap)), cap)

    Numerics: a rounding.
    """

    def rewrites(self):
        return [Rewrite(found, made, {{"x": "b s d"}})]
'''


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A plugin on the path, and nothing left of it afterwards."""
    name = "divide_once"
    (tmp_path / f"{name}.py").write_text(PLUGIN.format(name=name))
    (tmp_path / f"{name}.yaml").write_text(f"transforms: {{{name}: {{stage: schedule, enabled: false}}}}")
    (tmp_path / f"test_{name}.py").write_text("def test_other_factors_are_left_alone():\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name, ["--plugin", name, "--config", tmp_path / f"{name}.yaml"]
    TransformRegistry._known.pop(name, None)
    sys.modules.pop(name, None)


@pytest.mark.exhaustive
def test_a_plugin_is_checked_like_the_library(plugin):
    name, options = plugin
    capped = json.loads(graft(name, *options, "--model", "tiny-gemma-2", "--json").stdout)
    lines = {line["check"]: (line["verdict"], line["reason"]) for line in capped["transforms"][0]["lines"]}
    assert {check for check, (verdict, _) in lines.items() if verdict == "skip"} == {"documented", "matches"}
    assert lines["listed"][1].endswith(f"{name}.yaml, stage schedule, off (a plugin)")
    assert lines["negative tests"][1] == f"by their titles: test_{name}.py::test_other_factors_are_left_alone"
    # asked for by name, it matches nothing there, and nobody says why
    assert "choose a --model that has what it looks for" in graft(name, *options, code=1).stdout
    # the YAML beside it lists it: --config says the same
    assert "choose a --model that has what it looks for" in graft(name, *options[:2], code=1).stdout
