"""`graft compare`: where drift begins, told at the module and the transform that made it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from check_cases import scale
from conftest import tiny
from graft.base.errors import UsageError
from graft.cli.app import app
from graft.engine.llm import LLM
from graft.workbench.compare import compare_modules
from graft.workbench.compare.compare import DRIFT

IDS = [3 + 5 * at for at in range(14)]


@pytest.fixture(scope="module")
def found():
    return compare_modules(LLM(tiny("llama"), keep_weights=True, backend="eager"), IDS, 3)


def test_every_module_has_a_row_and_the_right_graph_does_not_drift(found):
    rows = {row.module: row for row in found.boundaries}
    assert {"model.embed_tokens", "model.layers.0.self_attn.q_proj", "model.layers.0", "lm_head"} <= set(rows)
    assert not found.not_found and found.drift is None and found.tokens == 14 and found.decode_steps == 3
    seen = [row for row in found.boundaries if row.ratio is not None]
    assert len(seen) > 8 and all(0 <= row.ratio <= DRIFT for row in seen)
    assert all(row.prompt < 1e-5 and row.decode < 1e-5 for row in seen)  # float32 against float64
    merged = rows["model.layers.0.self_attn.q_proj"]
    assert merged.made_by == "merge_qkv" and merged.node
    inside = rows["model.layers.0.mlp.act_fn"]
    assert inside.made_by == "fuse_swiglu" and inside.inside and inside.prompt is inside.decode is None
    assert [row.module for row in found.layers][:2] == ["model.embed_tokens", "model.layers.0"]


def test_drift_begins_at_the_module_whose_transform_is_wrong(monkeypatch):
    """The second gated activation is a thousandth too large: everything before it is as it was."""
    scale(monkeypatch, "fuse_swiglu", 1.001, at=[1])
    wrong = compare_modules(LLM(tiny("llama"), keep_weights=True, backend="eager", self_check=False), IDS, 3)
    assert wrong.drift is not None and wrong.drift.ratio > 100
    assert wrong.drift.module.startswith(("model.layers.1.mlp", "model.layers.1"))
    before = [row for row in wrong.boundaries if row.module.startswith("model.layers.0") and row.ratio is not None]
    assert before and all(row.ratio <= DRIFT for row in before)


@pytest.mark.exhaustive
def test_the_command_prints_a_table_or_json_and_plots(tmp_path):
    picture = tmp_path / "drift.svg"
    call = ["compare", "tiny-gpt2", "--dtype", "float32", "--backend", "eager", "--new", "2"]
    shown = CliRunner().invoke(app, [*call, "--layers", "--plot", str(picture)])
    assert shown.exit_code == 0, shown.output
    assert "transformer.h.1" in shown.output and "transformer.h.0.mlp" not in shown.output
    assert "no drift: nowhere is graft more than 2 times as far" in shown.output and picture.stat().st_size > 1000
    document = json.loads(CliRunner().invoke(app, [*call, "--json"]).stdout)
    first, last = document["boundaries"][0], document["boundaries"][-1]
    assert document["drift"] is None and last["module"] == "logits of the engine"
    assert {"prompt", "decode", "hf_prompt", "hf_decode", "node", "made_by", "ratio"} <= set(first)


@pytest.mark.exhaustive
def test_what_cannot_be_compared_is_said():
    with pytest.raises(UsageError, match="too few to compare"):
        compare_modules(LLM(tiny("gpt2"), keep_weights=True, backend="eager"), [1, 2], 2)
    for wrong, why in ((["--prompt", "hello"], "has no tokenizer"), (["--plot", "x.bmp"], "must end in")):
        refused = CliRunner().invoke(app, ["compare", "tiny-gpt2", *wrong])
        assert refused.exit_code == 2 and why in refused.output
