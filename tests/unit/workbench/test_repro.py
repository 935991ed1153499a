"""graft repro: one match as a file that runs by itself and says whether both sides are equal."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_discover import Stack, graph_of
from torch import Tensor, nn
from typer.testing import CliRunner

import graft
from graft.base.errors import ReproRefused, TransformOff, UnknownMatch, UnknownTransform
from graft.cli.app import app
from graft.passes.base import Context
from graft.passes.config import load_config
from graft.passes.patterns import PatternTransform, Rewrite
from graft.passes.pipeline import run_pipeline
from graft.passes.registry import TransformRegistry
from graft.workbench.dump import dump_model
from graft.workbench.repro.write import find_match, matches_of, repro_source
from graft.workbench.runs import open_run
from marks import short
from processes import run_python

SOURCE = Path(graft.__file__).parents[1]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Without weights, in bfloat16, every match checked."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    dump_model("tiny-llama", folder, load_config(sets=["verify=matches"]), "bfloat16")
    return folder


@pytest.fixture(scope="module")
def weighted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weighted") / "run"
    on = ["transforms.tabulate_rope.devices=[cpu]", "transforms.fuse_norm_into_matvec.devices=[cpu]"]
    dump_model("tiny-llama", folder, load_config(sets=on), "float32", weights=True)
    return folder


def execute(source):
    """The file's own main, in this process; some tests run it in one of its own."""
    space = {"__name__": "repro"}
    exec(compile(source, "repro.py", "exec"), space)
    return space["main"]()


def run_file(path):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    return run_python(path, cwd=path.parent, env=environment)


def cli(*args):
    return CliRunner().invoke(app, [*map(str, args)])


def test_the_file_runs_by_itself_and_a_broken_replacement_exits_1(plain, tmp_path):
    path = tmp_path / "norm.py"
    done = cli("repro", plain, "--match", "fuse_rms_norm:3", "-o", path)
    assert done.exit_code == 0 and f"python {path}" in done.output.replace("\n", ""), done.output
    text = path.read_text()
    assert re.search(r"def original\(\w+: Tensor, \w+: Tensor\) -> Tensor:", text)
    assert "torch.ops.graft.rms_norm.default(" in text and "import graft.ops" in text
    assert (
        re.search(r"were given values: s\d+ = \d+, s\d+ = \d+\.", text) and "model.layers.1.input_layernorm" in text
    )
    ran = run_file(path)
    assert ran.returncode == 0 and re.match(r"max error \S+, \S+ allowed: equal", ran.stdout), ran.stderr
    assert run_file(path).stdout == ran.stdout  # seeded
    broken = text.replace("rms_norm = torch.ops", "rms_norm = 1.1 * torch.ops")
    assert broken != text
    path.write_text(broken)
    ran = run_file(path)
    assert ran.returncode == 1 and "NOT EQUAL" in ran.stdout, ran.stderr


@pytest.mark.exhaustive
def test_every_match_of_a_run_is_equal_or_refused_with_its_reason(plain, weighted):
    """Without weights what a transform made of weights cannot be shown; with them it can."""
    refused = {}
    for folder in (plain, weighted):
        run = open_run(folder)
        for one in matches_of(run):
            try:
                assert execute(repro_source(run, one)) == 0, one.id
            except ReproRefused as error:
                refused.setdefault((folder.parent.name[:5], one.id.partition(":")[0]), str(error))
    assert set(refused) == {
        *(("plain", name) for name in ("merge_qkv", "merge_gate_up", "last_token_logits", "insert_kv_cache")),
        *(("weigh", name) for name in ("last_token_logits", "insert_kv_cache")),
    }
    assert "made the weight model.layers" in refused["plain", "merge_qkv"]
    assert "dump the model again with --weights" in refused["plain", "merge_qkv"]
    assert "depends on a cache" in refused["weigh", "insert_kv_cache"]


def test_weights_are_those_of_the_dump_where_it_has_them(weighted, plain):
    text = repro_source(open_run(weighted), find_match(open_run(weighted), "merge_qkv:1"))
    assert "stored['model.layers.0.self_attn.qkv_proj.weight']" in text
    assert f"load_state({str(weighted.resolve())!r})" in text
    random = repro_source(open_run(plain), find_match(open_run(plain), "fuse_rms_norm:1"))
    assert "load_state" not in random and random.count("torch.randn(") == 2


# ── a transform that is wrong ───────────────────────────────────────────────────────────────────────────────────


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, x):
        y = self.mix(x)
        return y * torch.sigmoid(y)


def by_hand(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def dumped(folder, factor):
    def silu(x: Tensor) -> Tensor:
        return F.silu(x) * factor if factor != 1 else F.silu(x)

    class Swish(PatternTransform):
        name = "fuse_swish_here"

        def rewrites(self):
            return [Rewrite(by_hand, silu, {"x": "b s d"}, exact=False)]

    TransformRegistry.register("fuse_swish_here")(Swish)
    try:
        config = load_config({"transforms": {"fuse_swish_here": {"stage": "match"}}})
        run_pipeline(graph_of(Stack(Block)), config, Context(), dump_dir=folder)
        run = open_run(folder)
        return repro_source(run, find_match(run, "2", "fuse_swish_here"))
    finally:
        del TransformRegistry._known["fuse_swish_here"]


@pytest.mark.parametrize(("factor", "code"), short([(1, 0), (1.01, 1), (1.00001, 1)], (1, 0), (1.01, 1)))
def test_a_replacement_that_is_wrong_in_the_run_exits_1(tmp_path, factor, code):
    """Nothing but torch is imported where no op of graft is called."""
    text = dumped(tmp_path / "run", factor)
    assert "graft" not in "".join(line for line in text.splitlines() if "import" in line)
    path = tmp_path / "swish.py"
    path.write_text(text)
    ran = run_file(path)
    assert ran.returncode == code, ran.stdout + ran.stderr


# ── naming a match ──────────────────────────────────────────────────────────────────────────────────────────────


def test_matches_are_listed_and_found_by_number_or_node(plain):
    run = open_run(plain)
    listed = cli("repro", plain, "-t", "fuse_swiglu")
    assert listed.exit_code == 0 and len(listed.output.strip().splitlines()) == 2 and "fuse_swiglu:2" in listed.output
    ids = [one["id"] for one in json.loads(cli("repro", plain, "--json").stdout)["items"]]
    assert ids == [one.id for one in matches_of(run)] and "fuse_rope:4" in ids
    one = find_match(run, "fuse_rope:2")
    anchor = one.record.anchor.split()[0]
    assert find_match(run, "2", "fuse_rope") == find_match(run, f"fuse_rope:{anchor}") == one


def test_bad_input_is_told_and_nothing_is_written(plain, tmp_path):
    run = open_run(plain)
    for name, transform in (
        ("fuse_rope:9", ""),
        ("fuse_rope:0", ""),
        ("3", ""),
        ("fuse_rope:x", ""),
        ("", "fuse_rope"),
    ):
        with pytest.raises(UnknownMatch, match=r"graft repro .* lists them"):
            find_match(run, name, transform)
    with pytest.raises(UnknownTransform, match="fuse_rope"):
        find_match(run, "fuse_ropes:1")
    with pytest.raises(TransformOff, match="was off in"):
        find_match(run, "quantize_linear:1")
    target = tmp_path / "no.py"
    assert cli("repro", plain, "--match", "fuse_rope:9", "-o", target).exit_code == 2
    assert cli("repro", tmp_path, "--match", "fuse_rope:1", "-o", target).exit_code == 1
    assert cli("repro", plain, "--match", "insert_kv_cache:1", "-o", target).exit_code == 1
    assert not target.exists()
    last = sorted(plain.glob("*_fuse_swiglu.json"))[-1]
    data = json.loads(last.read_text())
    text = last.read_text()
    for entry in data["nodes"]:
        entry["value"] = None
    try:
        last.write_text(json.dumps(data))
        with pytest.raises(ReproRefused, match=r"dump the model again|cannot be told"):
            repro_source(run, find_match(run, "fuse_rope:1"))
    finally:
        last.write_text(text)
