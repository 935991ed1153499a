"""Results of numeric checks on disk: a second run takes them, and whatever they depend on makes another key."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import faulty_ops
from graft.base.errors import TransformError
from graft.capture.decoder import capture_decoder
from graft.ir.edit import attach_state, attribute, second_module
from graft.ir.trace import export_graph
from graft.models.load import build_random
from graft.models.registry import entries
from graft.ops.swiglu import reference
from graft.passes.base import Context, Stage, TransformConfig
from graft.passes.config import PipelineConfig, load_config
from graft.passes.library import fuse_swiglu
from graft.passes.library.merge import linears as merge
from graft.passes.numeric import stored
from graft.passes.numeric.code import CodeText
from graft.passes.numeric_check import PairTrials
from graft.passes.patterns import PatternTransform, Rewrite
from graft.passes.pipeline import run_pipeline
from graft.passes.registry import TransformRegistry
from graft.passes.report import Report, checks_text


class Gated(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        torch.manual_seed(0)
        self.gates = nn.ModuleList([nn.Linear(8, 8, False) for _ in range(layers)])
        self.ups = nn.ModuleList([nn.Linear(8, 8, False) for _ in range(layers)])

    def forward(self, x):
        for gate, up in zip(self.gates, self.ups, strict=True):
            x = x + F.silu(gate(x)) * up(x)
        return x


def gated(layers=2, change=lambda module: None):
    module = Gated(layers)
    with torch.no_grad():
        change(module)
    return export_graph(module, (torch.randn(2, 5, 8),))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAFT_NO_CHECK_CACHE", "0")
    monkeypatch.setenv("GRAFT_CHECK_CACHE_DIR", str(tmp_path))
    return tmp_path


class Count:
    """Not a list: its items would be part of the check's code as it is in this process."""

    def __init__(self):
        self.tried = 0

    def __len__(self):
        return self.tried


@pytest.fixture
def tried(monkeypatch):
    """How many trials were run."""
    count = Count()
    real = PairTrials.try_one

    def try_one(self, trial):
        count.tried += 1
        real(self, trial)

    monkeypatch.setattr(PairTrials, "try_one", try_one)
    return count


def silu_times(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def faulty(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.ops.faulty.gated(gate, up, "")


def planted(gm, replacement):
    rewrites = [Rewrite(silu_times, replacement, fuse_swiglu.SHAPES)]
    made = type("Planted", (PatternTransform,), {"__doc__": "For a test.", "rewrites": lambda self: rewrites})
    TransformRegistry.register("planted")(made)
    try:
        config = PipelineConfig({"planted": TransformConfig(Stage.MATCH)}, verify="matches")
        return run_pipeline(gm, config).transforms["planted"].matches
    finally:
        TransformRegistry._known.pop("planted", None)


def test_a_second_run_takes_every_result_from_disk(folder, tried):
    first = run_pipeline(gated(), load_config({"verify": "matches"}))
    count = len(tried)
    second = run_pipeline(gated(), load_config({"verify": "matches"}))
    assert count > 20 and len(tried) == count
    for name in ("fuse_swiglu", "merge_gate_up"):
        was, now = (report.transforms[name].matches for report in (first, second))
        assert [replace(match.numeric_check, origin="") for match in now] == [match.numeric_check for match in was]
        assert "2 checked numerically (from the cache), worst" in checks_text(now)
    assert Report.from_json(second.to_json()).transforms == second.transforms


@pytest.mark.exhaustive
def test_of_32_equal_layers_one_is_tried_and_of_a_second_run_none(folder, tried):
    """Whatever the clock says: a check of every match would run thirty times as many trials."""
    entry = entries()["tiny-llama"]
    deep = replace(entry, settings={**entry.settings, "num_hidden_layers": 32})
    model = build_random(deep, torch.float32, torch.device("cpu"))
    captured = capture_decoder(model.module)

    def verified():
        context = Context(route="decoder", context_length=model.context)
        report = run_pipeline(second_module(captured), load_config({"verify": "matches"}), context)
        return [(r.name, m.numeric_check) for r in report.transforms.values() for m in r.matches if m.numeric_check]

    checks = verified()
    kinds = {(name, replace(check, origin="")) for name, check in checks}
    made = sum(name.startswith("merge_") for name, _ in checks)  # a weight that was made for one layer is tried once
    assert len(checks) > 5 * 32 and len(kinds) < 3 * len({name for name, _ in kinds})
    every = sum(check.trials for _, check in checks)
    assert len(tried) <= sum(check.trials for _, check in kinds) + made < every / 10
    count = len(tried)
    again = verified()
    assert len(tried) == count
    assert [replace(check, origin="") for _, check in again] == [replace(check, origin="") for _, check in checks]
    assert all(check.origin == stored.FROM_CACHE for _, check in again)


def test_it_can_be_turned_off(folder, tried, monkeypatch):
    monkeypatch.setenv("GRAFT_NO_CHECK_CACHE", "1")
    for _ in range(2):
        assert not planted(gated(), faulty)[0].numeric_check.origin
    assert not list(folder.iterdir())


def test_another_implementation_of_an_op_is_another_check(folder, monkeypatch):
    assert not planted(gated(), faulty)[0].numeric_check.origin
    assert planted(gated(), faulty)[0].numeric_check.origin == stored.FROM_CACHE
    monkeypatch.setitem(faulty_ops.FAULTS, "", lambda right, gate, up: right * 1.05)
    for _ in range(2):  # what failed is not kept
        with pytest.raises(TransformError, match="is off by"):
            planted(gated(), faulty)


def test_another_reference_of_our_own_op_is_another_check(folder, monkeypatch):
    def fused(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.ops.graft.swiglu(gate, up)

    planted(gated(), fused)
    monkeypatch.setitem(reference.ACTIVATIONS, "silu", F.relu)
    with pytest.raises(TransformError, match="is off by"):
        planted(gated(), fused)


def scale_weight(factor, layer=1):
    def change(module):
        module.gates[layer].weight.mul_(factor)

    return change


def test_other_weights_are_another_check(folder, tried):
    planted(gated(), faulty)
    count = len(tried)
    planted(gated(change=scale_weight(2.0)), faulty)
    assert len(tried) == count  # the op reads no weight
    run_pipeline(gated(), load_config({"verify": "matches"}))
    count = len(tried)
    run_pipeline(gated(change=scale_weight(2.0)), load_config({"verify": "matches"}))
    assert len(tried) == count + 1  # the merge of the second layer


def test_a_merge_that_went_wrong_is_found_behind_one_that_is_stored(folder, monkeypatch):
    run_pipeline(gated(), load_config({"verify": "matches"}))
    real = merge.merge_linears

    def wrong(editor, linears, *rest):
        made = real(editor, linears, *rest)
        weight = next(node for node in made if node.op == "get_attr")
        attach_state(editor.gm, weight.target, nn.Parameter(attribute(editor.gm, weight.target) * 1.5))
        return made

    monkeypatch.setattr(merge, "merge_linears", wrong)
    with pytest.raises(TransformError, match="merge_gate_up failed"):
        run_pipeline(gated(), load_config({"verify": "matches"}))


@pytest.mark.some(1)
@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff", "flip"], ids=str)
def test_a_damaged_entry_is_told_and_made_anew(folder, damage, caplog):
    planted(gated(), faulty)
    (file,) = folder.iterdir()
    right = file.read_bytes()
    file.write_bytes(right.replace(b'"error"', b'"errOr"') if damage == "flip" else damage)
    (check, _) = (match.numeric_check for match in planted(gated(), faulty))
    assert check.origin.startswith("tried again: the stored result is damaged") and str(file) in caplog.text
    assert file.read_bytes() == right
    assert planted(gated(), faulty)[0].numeric_check.origin == stored.FROM_CACHE


def test_an_op_without_python_code_is_not_stored(folder):
    with torch.library._scoped_library("unseen", "FRAGMENT") as library:
        library.define("gated(Tensor gate, Tensor up) -> Tensor")
        library.impl("gated", lambda gate, up: F.silu(gate) * up, "CompositeExplicitAutograd")
        torch.library.register_fake("unseen::gated", lambda gate, up: torch.empty_like(gate), lib=library)

        def unseen(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            return torch.ops.unseen.gated(gate, up)

        (match, _) = planted(gated(), unseen)
    assert match.numeric_check.origin == "not stored: unseen.gated.default has no Python code that could be looked at"
    assert not list(folder.iterdir())


def test_a_folder_that_cannot_be_written_is_told(folder, monkeypatch):
    blocked = folder / "file"
    blocked.write_text("")
    monkeypatch.setenv("GRAFT_CHECK_CACHE_DIR", str(blocked / "checks"))
    assert planted(gated(), faulty)[0].numeric_check.origin.startswith("not stored: ")


# ── code as text ─────────────────────────────────────────────────────────────────────────────────────────────────

SOURCE = """
import torch
SCALE = {scale}
class Table:
    factor = {factor}
    def of(self, x): return x * self.factor
TABLE = {{"a": lambda x: x + {added}}}
def made(k):
    def inner(x, y={default}): return Table().of(x) * SCALE + k + TABLE["a"](x) + y
    return inner
run = made({closed})
def lazily(x):
    import {lazy}
    return {lazy}.f(x) + run(x)
"""


def code_text(path, values, function="lazily"):
    """Of a module with this source, in a new process's place."""
    name = f"code_{path.name}"
    (path / f"lazy_{name}.py").write_text(f"def f(x): return x - {values['late']}")
    (path / f"{name}.py").write_text(SOURCE.format(lazy=f"lazy_{name}", **values))
    sys.path.insert(0, str(path))
    importlib.invalidate_caches()
    sys.dont_write_bytecode = True
    try:
        module = importlib.import_module(name)
        return "\n".join(CodeText().lines({"f": getattr(module, function)}))
    finally:
        sys.path.remove(str(path))
        sys.modules.pop(name, None)
        sys.dont_write_bytecode = False


FACTS = ("scale", "factor", "added", "default", "closed", "late")


@given(st.sampled_from(FACTS), st.lists(st.integers(0, 99), min_size=6, max_size=6))
def test_every_number_that_code_depends_on_is_in_its_text(tmp_path_factory, changed, numbers):
    path = tmp_path_factory.mktemp("code")
    values = dict(zip(FACTS, numbers, strict=True))
    text = code_text(path, values)
    assert text == code_text(path, values)
    assert text != code_text(path, values | {changed: values[changed] + 100})


PLUGIN = '''
"""Fuses a gated activation."""
import torch
import torch.nn.functional as F
import graft

@torch.library.custom_op("mine::gated", mutates_args=())
def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up * FACTOR

@gated.register_fake
def _(gate, up):
    return torch.empty_like(gate)

def before(gate, up):
    return F.silu(gate) * up

def after(gate, up):
    return torch.ops.mine.gated(gate, up)

@graft.TransformRegistry.register("fuse_mine")
class FuseMine(graft.PatternTransform):
    """Fuses."""
    def rewrites(self):
        return [graft.Rewrite(before, after, {"gate": "b s d", "up": "b s d"})]
'''


@pytest.mark.exhaustive
def test_a_changed_plugin_is_checked_anew_by_the_next_process(tmp_path):
    plugin = tmp_path / "fuse_mine.py"
    plugin.with_suffix(".yaml").write_text("transforms:\n  fuse_mine: {stage: match, before: [fuse_swiglu]}\n")
    command = [sys.executable, "-m", "graft", "explain", "tiny-llama", "fuse_mine", "--verify", "--json"]

    def explained(factor):
        plugin.write_text(PLUGIN.replace("FACTOR", factor))
        environment = {**os.environ, "GRAFT_CACHE_DIR": str(tmp_path), "GRAFT_NO_CHECK_CACHE": "0"}
        done = subprocess.run([*command, "--plugin", str(plugin)], env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    assert stored.FROM_CACHE not in explained("1.0")[1]
    assert stored.FROM_CACHE in explained("1.0")[1]
    status, text = explained("1.5")
    assert status != 0 and "off by" in text, text
