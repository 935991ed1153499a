"""fix_functionalization as a pass with a name: on and off, its record, near misses, dumps, diff and explain."""

from __future__ import annotations

import gc
import runpy
import sys
from pathlib import Path

import pytest
import torch

import graft
from graft.base.errors import ConfigError, DumpError
from graft.passes.config import load_config
from graft.passes.dumps import DumpWriter
from graft.passes.pipeline import order_transforms
from graft.workbench.diff_text import graph_lines
from graft.workbench.explain import explain_model
from inductor_cases import compilations

NAME = "fix_functionalization"


@torch.library.custom_op("r23::put_", mutates_args=("cache",))
def put_(cache: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> None:
    cache.index_copy_(0, at, rows)


put_.register_fake(lambda cache, rows, at: None)


def update(cache, rows, at):
    """Two writes: the second has to keep what it overwrites, since that is returned."""
    torch.ops.r23.put_(cache, rows, at)
    own = rows * 2
    before = own + 0
    kept = own.view(-1)
    torch.ops.r23.put_(own, rows + 1, at)
    return before, kept.sum(), own


def returns_the_old(cache, rows, at):
    new = cache.clone()
    torch.ops.r23.put_(new, rows, at)
    return new + cache, new


def arguments():
    return torch.zeros(8, 4), torch.randn(8, 4), torch.arange(8)


pytestmark = pytest.mark.usefixtures("compiled_anew")


def test_stock_inductor_with_the_pass_alone(tmp_path):
    cache, rows, at = arguments()
    wanted, own = returns_the_old(cache.clone(), rows, at), cache.clone()
    seen = len(graft.functionalization_reports())
    got = torch.compile(returns_the_old, options=graft.fix_functionalization(dump_dir=tmp_path))(own, rows, at)
    assert all(map(torch.equal, got, wanted)) and torch.equal(own, cache)
    (report,) = graft.functionalization_reports()[seen:]
    record = report.transforms[NAME]
    assert record.status == "applied" and [match.pattern for match in record.matches] == ["r23.put_.default"]
    assert "test_fix_functionalization.py" in record.matches[0].anchor
    (miss,) = record.near_misses
    assert "is copied (128 bytes)" in miss.reason and miss.name == record.matches[0].name
    run = graft.open_run(tmp_path / "graph_0")
    before, after = run.around(NAME)
    assert "auto_functionalized_v2" in before.text() and "auto_functionalized_v2" not in after.text()
    difference = graft.diff_graphs(before.graph().graph, after.graph().graph)
    assert f"- %{record.matches[0].name}" in "\n".join(line.text for line in graph_lines(difference, unfold=True))
    assert run.report.transforms[NAME].matches == record.matches


def test_graft_compile_has_the_record_and_turns_it_off():
    cache, rows, at = arguments()
    compiled = graft.compile(update, (cache, rows, at), backend="inductor")
    record = compiled.report.transforms[NAME]
    assert record.status == "skipped" and "first call" in record.reason
    own, wanted = cache.clone(), cache.clone()
    expected, got = update(wanted, rows, at), compiled(own, rows, at)
    torch.testing.assert_close(got, expected)  # Inductor sums in another order
    assert torch.equal(own, wanted)
    record = compiled.report.transforms[NAME]
    assert record.status == "applied" and len(record.matches) == 2 and record.nodes_before > 0
    off = {"transforms": {NAME: {"enabled": False}}}
    stock = graft.compile(update, (cache, rows, at), backend="inductor", config=off)
    assert stock.report.transforms[NAME].status == "disabled"
    assert any(f"{NAME} is off" in note for note in stock.report.notes)


def test_the_torch_compile_backend_has_the_record():
    cache, rows, at = arguments()
    backend = graft.Backend()
    torch.compile(update, backend=backend)(cache.clone(), rows, at)
    assert len(backend.reports[-1].transforms[NAME].matches) == 2
    off = graft.Backend({"transforms": {NAME: {"enabled": False}}})
    torch.compile(update, backend=off)(cache.clone(), rows, at)
    assert off.reports[-1].transforms[NAME].status == "disabled"
    assert any(f"{NAME} is off" in note for note in off.reports[-1].notes)


def test_the_passes_for_inductor_have_the_record():
    cache, rows, at = arguments()
    torch.compile(update, options=graft.passes_for_inductor())(cache.clone(), rows, at)
    assert len(compilations()[-1].transforms[NAME].matches) == 2


def test_a_graph_that_cannot_be_dumped_is_compiled_all_the_same(tmp_path, monkeypatch, caplog):
    def refuse(self, stage, name, gm):
        raise DumpError("a graph holds a kernel")

    monkeypatch.setattr(DumpWriter, "write", refuse)
    cache, rows, at = arguments()
    torch.compile(update, options=graft.fix_functionalization(dump_dir=tmp_path))(cache.clone(), rows, at)
    assert "is not dumped: a graph holds a kernel" in caplog.text
    assert len(graft.functionalization_reports()[-1].transforms[NAME].matches) == 2


def test_it_is_listed_and_not_in_grafts_own_pipeline():
    assert NAME in load_config().transforms and NAME not in order_transforms(load_config())
    for name, stage in ((NAME, "state"), ("fuse_rope", "inductor")):
        with pytest.raises(ConfigError, match=rf"transforms.{name}.stage={stage}: the stage inductor"):
            load_config({"transforms": {name: {"stage": stage}}})


def test_explain_shows_it_on_a_model():
    explained = explain_model("tiny-llama", NAME, load_config())
    assert [match.site.layer for match in explained.matches] == [0, 1]
    assert {match.pattern for match in explained.matches} == {"graft.paged_attention.default"}


@pytest.mark.exhaustive  # the short run: what explain says, above
def test_the_example_shows_it_on_a_model(monkeypatch, capsys):
    path = Path(__file__).parents[3] / "examples" / "transform_before_after.py"
    monkeypatch.setattr(sys, "argv", [str(path), "--transform", NAME])
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert f"{NAME} on tiny-llama" in printed and "- %auto_functionalized_v2" in printed
    assert "+ %paged_attention_default" in printed


@pytest.mark.parametrize("enabled", [True, False])
def test_a_saved_module_keeps_it_on_or_off(tmp_path, enabled):
    config = {"transforms": {NAME: {"enabled": enabled}}}
    compiled = graft.compile(lambda x: x + 1, (torch.ones(2),), backend="inductor", config=config)
    compiled.save(tmp_path / "saved")
    loaded = graft.load(tmp_path / "saved")
    assert loaded.settings.config.transforms[NAME].enabled is enabled
    assert [variant.fix is not None for variant in loaded.variants] == [enabled]
    assert [note for note in loaded.report.notes if NAME in note] == [n for n in compiled.report.notes if NAME in n]


class Branches(torch.nn.Module):
    """One row and several take two ways through it."""

    def forward(self, cache, rows, at):
        torch.ops.r23.put_(cache, rows, at)
        return cache * 2 if rows.shape[0] == 1 else cache + 1


@pytest.mark.exhaustive  # the short run: the record of one
def test_the_report_has_the_fixes_of_every_variant():
    cache, rows, at = arguments()
    free = {"cache": None, "rows": {0: torch.export.Dim.AUTO}, "at": {0: torch.export.Dim.AUTO}}
    compiled = graft.compile(Branches(), (cache, rows, at), dynamic_shapes=free, backend="inductor")
    compiled(cache, rows, at)
    assert len(compiled.report.transforms[NAME].matches) == 1
    wanted = Branches()(cache.clone(), rows[:1], at[:1])
    torch.testing.assert_close(compiled(cache, rows[:1], at[:1]), wanted)
    assert len(compiled.variants) == 2 and len(compiled.report.transforms[NAME].matches) == 2
    assert len(compiled.variants[1].report_now.transforms[NAME].matches) == 1


def test_observers_go_with_their_modules():
    from graft.api.functionalization import FixRecorder
    from graft.memory.inductor_fix.functionalization import OBSERVERS

    recorder, known = FixRecorder(), dict(OBSERVERS)
    key = recorder.key
    assert key in OBSERVERS
    del recorder
    gc.collect()
    assert key not in OBSERVERS
    known[key](torch.fx.Graph(), None)  # a pass that still has it tells nobody
