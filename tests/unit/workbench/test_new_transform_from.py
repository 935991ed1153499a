"""graft new-transform --from: a candidate of graft discover becomes a transform that matches its model."""

from __future__ import annotations

import json

import pytest
import torch
from test_discover import (
    CubedReluMLP,
    GatedResidual,
    LogitScaledNorm,
    Silu,
    Stack,
    found_in_gemma,
    graph_of,
    transformed,
)
from torch import nn
from typer.testing import CliRunner

from graft.base.errors import PatternError, ShapesUnknown, UnknownCandidate, UsageError
from graft.cli.app import app
from graft.workbench.discover import discover
from graft.workbench.scaffold.candidate import existing_call, read_seed, seed_of
from graft.workbench.scaffold.plan import transform_from

BLOCKS = {"fuse_cubed_relu": CubedReluMLP, "fuse_gated": GatedResidual, "fuse_scaled_norm": LogitScaledNorm}


def seed(block, model="Stack"):
    found = discover(transformed(Stack(block)), model=model)
    return seed_of(found.worthwhile[0], found.model)


# ── kernels that exist ──────────────────────────────────────────────────────────────────────────────────────────


class ByHand(Silu):
    def forward(self, x):
        y = self.mix(x)
        return y * torch.sigmoid(y)


def test_a_kernel_of_aten_is_called_with_its_inputs_in_order(tmp_path):
    found = discover(graph_of(Stack(ByHand)), model="Stack")
    one = seed_of(found.worthwhile[0], "Stack")
    transform_from("fuse_swish", one, tmp_path)
    assert "return silu" in (tmp_path / "fuse_swish.py").read_text()
    made = transform_from("fuse_swish_op", one, tmp_path, op=True)
    assert made.op == "swish_op" and (tmp_path / "swish_op_op" / "reference.py").exists()


class AddedProduct(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return x.cumsum(1) + self.mix(x)


def test_a_kernel_whose_arguments_follow_from_sizes_is_refused_with_the_reason():
    candidate = next(c for c in discover(graph_of(Stack(AddedProduct))).candidates if c.title == "linear → add")
    one = seed_of(candidate, "Stack")
    aten = type(one)(**{**vars(one), "existing": tuple(e for e in one.existing if e[0] != "graft")})
    with pytest.raises(UsageError, match=r"aten::addmm: its arguments follow from sizes; addmm: a pattern.*--op"):
        existing_call(aten, "by_kernel")


# ── where candidates come from, and bad input ───────────────────────────────────────────────────────────────────


def graft(*args):
    return CliRunner().invoke(app, [*map(str, args)])


@pytest.mark.exhaustive
def test_from_a_model_dumps_or_a_file_of_candidates(tmp_path):
    """The same files whichever way it is named."""
    config = ("--dtype", "float32")
    assert graft("dump", "tiny-gemma-2", "-o", tmp_path / "run", *config).exit_code == 0
    listed = graft("discover", "tiny-gemma-2", *config, "--json")
    (tmp_path / "found.json").write_text(listed.stdout)
    cap = next(c for c in json.loads(listed.stdout)["candidates"] if c["title"] == "div → tanh → mul")
    assert cap["pattern"] == {"shapes": {"x": "a b c"}, "problem": ""}
    ways = {
        "model": ("--from", cap["id"][:5], "--model", "tiny-gemma-2", *config),
        "dumps": ("--from", cap["id"], "--model", tmp_path / "run"),
        "file": ("--from", f"{tmp_path}/found.json:{cap['id'][:6]}"),
    }
    texts = set()
    for way, options in ways.items():
        done = graft("new-transform", "fuse_cap", *options, "--dir", tmp_path / way, "--json")
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["op"] == "cap"
        texts.add((tmp_path / way / "fuse_cap.py").read_text().replace(" after widen_linear", ""))
    assert len(texts) == 1 and "torch.tanh(div)" in texts.pop()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--from", "zzzz", "--model", "tiny-llama"), "unknown candidate 'zzzz'"),
        (("--from", "zzzz"), "say where it was found, with --model"),
        (("--from", "nothere.json:ab"), "cannot be read"),
        (("--from", "bad.json:ab"), "is not what graft discover MODEL --json writes"),
        (("--from", "empty.json:ab"), "unknown candidate 'ab'"),
        (("--from", "old.json:ab"), "has no recorded shape"),
        (("--from", "empty.json:ab", "--model", "tiny-llama"), "names a file already"),
        (("--from", "x", "--model", "tiny-llama", "--pattern", "a.py:b"), "brings its own pattern"),
        (("--model", "tiny-llama"), "belongs to --from"),
        (("--dtype", "float32"), "--dtype belongs to --from"),
        (("--from", "x", "--model", "."), "neither a folder of dumps"),
    ],
)
def test_bad_input_is_told_and_nothing_is_written(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("[1]")
    (tmp_path / "empty.json").write_text('{"model": "m", "candidates": []}')
    old = {"id": "ab", "title": "t", "count": 1, "existing": [], "reference": "def f(): ..."}
    (tmp_path / "old.json").write_text(json.dumps({"model": "m", "candidates": [old]}))
    done = graft("new-transform", "fuse_it", *options, "--dir", tmp_path / "made")
    assert done.exit_code in (1, 2) and message in done.output, done.output
    assert not (tmp_path / "made").exists()


def test_candidates_without_shapes_or_a_pattern_and_names_that_are_taken_are_refused(tmp_path):
    gm = graph_of(Stack(GatedResidual))
    del next(n for n in gm.graph.nodes if n.target is torch.ops.aten.sigmoid.default).meta["val"]
    with pytest.raises(ShapesUnknown, match="no recorded shape"):
        read_seed("ab", lambda: discover(gm))
    found = found_in_gemma()
    table = next(c for c in found.candidates if c.kind == "position_table")
    with pytest.raises(PatternError, match=r"cannot be a pattern: it reads %size"):
        seed_of(table, found.model)
    with pytest.raises(UnknownCandidate):
        read_seed("zz", lambda: found)
    for name, message in (("fuse_rope", "is there already"), ("fuse_silu_triton", "carry no backend")):
        with pytest.raises(UsageError, match=message):
            transform_from(name, seed(GatedResidual), tmp_path / "made")
    assert not (tmp_path / "made").exists()
