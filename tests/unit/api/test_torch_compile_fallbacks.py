"""torch.compile with graft as the backend: what is left to stock Inductor, and the settings."""

from __future__ import annotations

import importlib
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import graft
from graft.api.torch_compile import graft_backend
from graft.base.errors import UnknownKey, UsageError
from graft.ir.patterns.match import Finder
from torch_compile_cases import (
    FUSED,
    Block,
    counts,
    eager_backend,
    pytestmark,  # noqa: F401  (every test starts with nothing compiled)
    run,
)

# ── what goes to stock Inductor ─────────────────────────────────────────────────────────────────────────────────


def test_a_graph_break_gives_two_reports():
    module = Block()

    def broken(x):
        y = module(x)
        torch._dynamo.graph_break()
        return module(y)

    x = torch.randn(3, 8)
    got, backend = run(broken, x)
    assert torch.equal(got, broken(x))
    assert [report.model for report in backend.reports] == ["graph_0", "graph_1"]
    assert [counts(report) for report in backend.reports] == [FUSED, FUSED]


def test_gradients_are_those_of_eager_and_the_fallback_is_told_once():
    module, other = Block(), Block()
    other.load_state_dict(module.state_dict())
    backend = eager_backend()
    compiled = torch.compile(module, backend=backend)
    with pytest.warns(UserWarning, match=r"torch.no_grad\(\)"):
        compiled(torch.ones(3, 8)).square().sum().backward()
    other(torch.ones(3, 8)).square().sum().backward()
    for got, wanted in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.allclose(got.grad, wanted.grad, rtol=1e-5, atol=1e-6) and wanted.grad.any()
    assert backend.reports[0].transforms == {} and "no backward" in backend.reports[0].notes[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(torch.ones(4, 8))
    assert len(backend.reports) == 2 and "no backward" in backend.reports[1].notes[0]
    with torch.no_grad():
        compiled(torch.ones(3, 8))
    assert counts(backend.reports[-1]) == FUSED


def test_gradients_turned_on_inside_the_graph_are_left_to_inductor():
    module = Block()

    def inside(x):
        with torch.enable_grad():
            return module(x)

    with pytest.warns(UserWarning, match="gradients"):
        got, backend = run(inside, torch.ones(3, 8))
    assert torch.equal(got, module(torch.ones(3, 8))) and "gradients" in backend.reports[0].notes[0]


def test_no_grad_inside_the_graph_is_no_hindrance():
    module = Block().requires_grad_(False)

    @torch.no_grad()
    def inner(x):
        return module(x)

    backend = eager_backend()
    x = torch.randn(3, 8)
    got = torch.compile(lambda x: inner(x) * 2, backend=backend)(x)
    assert torch.equal(got, module(x) * 2) and counts(backend.reports[0]) == FUSED


def test_autocast_is_left_to_inductor_where_it_is_on():
    module = Block()

    def region(x):
        with torch.autocast("cpu", torch.bfloat16):
            return module(x)

    def off(x):
        with torch.autocast("cpu", enabled=False):
            return module(x)

    x = torch.randn(3, 8)
    with torch.no_grad(), pytest.warns(UserWarning, match="autocast"):
        got, backend = run(region, x)
        assert got.dtype == region(x).dtype and torch.equal(got, region(x))
        assert "opens an autocast region" in backend.reports[0].notes[0]
        with torch.autocast("cpu", torch.bfloat16):
            got, backend = run(module, x)
            assert torch.equal(got, module(x)) and "autocast is on" in backend.reports[0].notes[0]
    got, backend = run(off, x)
    assert torch.equal(got, off(x)) and counts(backend.reports[0]) == FUSED


def test_dropout_stays_in_training_mode():
    module = nn.Sequential(Block(), nn.Dropout(0.5), Block())
    x = torch.randn(30, 8)
    compiled = torch.compile(module, backend=eager_backend())
    with torch.no_grad():
        torch.manual_seed(0)
        got = compiled(x)
        torch.manual_seed(0)
        assert torch.equal(got, module(x))
        assert not torch.equal(got, module.eval()(x))


def test_a_higher_order_op_is_left_to_inductor():
    def chosen(x):
        return torch.utils.checkpoint.checkpoint(lambda x: x * 2, x, use_reentrant=False)

    with pytest.warns(UserWarning, match="subgraph|higher-order"):
        got, _ = run(chosen, torch.ones(3))
    assert torch.equal(got, torch.full((3,), 2.0))


def test_a_value_known_at_run_time_only_is_left_to_inductor():
    def scaled(x):
        return x * x.max().item()

    with torch._dynamo.config.patch(capture_scalar_outputs=True), pytest.warns(UserWarning, match="run time only"):
        got, _ = run(scaled, torch.tensor([1.0, 3.0]))
    assert torch.equal(got, torch.tensor([3.0, 9.0]))


def test_inference_mode():
    module, x = Block(), torch.randn(3, 8)
    backend = eager_backend()
    with torch.inference_mode():
        assert torch.equal(torch.compile(module, backend=backend)(x), module(x))
    assert counts(backend.reports[0]) == FUSED


def test_a_failing_transform_raises_or_is_reported(monkeypatch):
    def broken(self, graph):
        raise ValueError("made to fail")

    monkeypatch.setattr(Finder, "find", broken)
    module, x = Block(), torch.randn(3, 8)
    with pytest.raises(
        BackendCompilerFailed, match="fuse_rms_norm failed and was rolled back: ValueError: made to fail"
    ):
        run(module, x)
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="made to fail"):
        got, backend = run(module, x, backend=eager_backend(on_error="skip"))
    assert torch.equal(got, module(x))
    assert "no transform ran on this graph" in backend.reports[0].notes[0]
    torch._dynamo.reset()
    config = {"transforms": {name: {"on_error": "skip"} for name in ("fuse_rms_norm", "fuse_swiglu")}}
    got, backend = run(module, x, backend=eager_backend(config=config))
    record = backend.reports[0].transforms["fuse_rms_norm"]
    assert torch.equal(got, module(x)) and record.status == "rolled_back" and "made to fail" in record.reason


def test_a_failing_trace_raises_or_is_reported(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("cannot trace")

    monkeypatch.setattr("graft.backends.dynamo.make_fx", broken)
    with pytest.raises(BackendCompilerFailed, match="cannot be traced to ATen: RuntimeError: cannot trace"):
        run(Block(), torch.randn(3, 8))
    torch._dynamo.reset()
    module, x = Block(), torch.randn(3, 8)
    with pytest.warns(UserWarning, match="cannot trace"):
        got, backend = run(module, x, backend=eager_backend(on_error="skip"))
    assert torch.equal(got, module(x)) and "CaptureError" in backend.reports[0].notes[0]


# ── settings ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_settings_are_checked_before_anything_is_compiled():
    with pytest.raises(UnknownKey, match="enable"):
        graft.Backend({"transforms": {"fuse_rope": {"enable": False}}})
    with pytest.raises(UsageError, match="on_error"):
        graft.Backend(on_error="ignore")
    _, backend = run(
        Block(), torch.randn(3, 8), backend=eager_backend(config={"transforms": {"fuse_swiglu": {"enabled": False}}})
    )
    assert backend.reports[0].transforms["fuse_swiglu"].status == "disabled"
    compiled = torch.compile(Block(), backend=eager_backend(), mode="reduce-overhead")
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match="are Inductor's"):
        compiled(torch.randn(3, 8))


def test_dumps_go_to_a_folder_for_each_graph(tmp_path):
    run(Block(), torch.randn(3, 8), backend=eager_backend(dump_dir=tmp_path))
    assert (tmp_path / "graph_0" / "report.json").exists()


def test_the_name_graft_is_an_entry_point():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    target = project["project"]["entry-points"]["torch_dynamo_backends"]["graft"]
    module, _, name = target.partition(":")
    assert getattr(importlib.import_module(module), name) is graft_backend


def test_the_string_form_and_its_reports():
    """Through Inductor: the numbers are eager's, and the reports are reachable without a backend object."""
    name = "graft_under_test"  # the installed entry point may be another checkout's
    torch._dynamo.register_backend(graft_backend, name=name)
    assert name in torch._dynamo.list_backends()
    before, module, x = len(graft.backend_reports()), Block(), torch.randn(3, 8)
    with torch.no_grad():
        got = torch.compile(module, backend=name)(x)
        wanted = module(x)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    (report,) = graft.backend_reports()[before:]
    assert counts(report) == FUSED and "inductor" in report.notes[0]


def test_the_installed_package_brings_the_backend():
    from importlib.metadata import entry_points

    from graft.api.torch_compile import graft_backend

    found = entry_points(group="torch_dynamo_backends", name="graft")
    if not found:
        pytest.skip("graft is on the path, but not installed")
    assert all(entry.load() is graft_backend for entry in found)
