"""Writes that a rewrite must not move past: angles, attributes in one memory; and rules that must keep dtypes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graft.api.torch_compile import Backend
from graft.base.errors import ConfigError, UnknownKey, UsageError
from graft.ir.nodes import calls, is_op
from graft.ir.trace import export_graph
from graft.passes.config import load_config, read_yaml
from graft.passes.pipeline import run_pipeline
from graft.passes.registry import load_all

ops = torch.ops.graft


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def written_halves(x, angles):
    cos, sin = angles.cos(), angles.sin()
    cos[:, 0] = 1
    sin[:, 0] = 0
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def test_a_write_to_the_angles_is_not_lost():
    x, angles = torch.randn(1, 2, 5, 8), torch.randn(1, 1, 5, 4)[0]
    module = Function(written_halves)
    gm = export_graph(module, (x, angles))
    record = run_pipeline(gm, load_config()).transforms["fuse_rope"]
    assert not record.matches and "written in place" in record.reason
    assert torch.equal(gm(x, angles), module(x, angles))


class Shared(nn.Module):
    """Two buffers in one memory; one is written while the other's old value is on its way."""

    def __init__(self):
        super().__init__()
        memory = torch.randn(2, 4, 8)
        self.register_buffer("cache", memory)
        self.register_buffer("first", memory[0])

    def forward(self, x):
        held = F.silu(self.first)
        once = self.first * 1
        self.cache.mul_(2)
        return held * x, once + x


def test_attributes_in_one_memory_are_written_together():
    x = torch.randn(4, 8)
    expected = Shared()
    torch.manual_seed(0)
    module = Shared()
    expected.load_state_dict(module.state_dict())
    memory = module.cache.clone()
    gm = export_graph(module, (x,))
    record = run_pipeline(gm, load_config()).transforms["fuse_swiglu"]
    assert not record.matches and "written in place" in record.reason
    module.cache.copy_(memory)
    got = gm(x)
    held, once = F.silu(memory[0]) * x, memory[0] + x
    assert torch.equal(got[0], held) and torch.equal(got[1], once)


def test_squares_of_truth_values_stay_truth_values():
    module, x = Function(lambda x: (x > 0) * (x > 0)), torch.randn(5)
    gm = export_graph(module, (x,))
    assert gm(x).dtype is torch.bool and torch.equal(gm(x), module(x))


def test_a_number_with_alpha_keeps_it():
    module, x = (
        Function(lambda x: torch.ops.aten.add.Scalar(x, 2, 3) - torch.ops.aten.sub.Scalar(x, 1, 4)),
        torch.ones(3),
    )
    gm = export_graph(module, (x,))
    assert torch.equal(gm(x), module(x))


def test_options_do_not_drop_the_fix():
    backend, seen = Backend(), []
    compiled = torch.compile(lambda x: x + 1, backend=backend, options={"post_grad_custom_post_pass": seen.append})
    with torch.no_grad():
        compiled(torch.ones(2))
    assert len(seen) == 1 and backend.reports[-1].transforms["fix_functionalization"].status == "no_match"


def test_meta_tensors_and_skipped_kernels_on_the_torch_compile_route():
    with torch.no_grad():
        out = torch.compile(lambda x: x + 1, backend=Backend(inductor=False))(torch.randn(5, device="meta"))
    assert out.is_meta
    load_all()
    backend = Backend({"kernels": {"swiglu": "triton"}}, inductor=False, on_error="skip")
    x = torch.randn(3, 8)
    with torch.no_grad(), pytest.warns(UserWarning, match="Triton kernels run on a GPU"):
        got = torch.compile(lambda g, u: F.silu(g) * u, backend=backend)(x, x)
    assert torch.equal(got, F.silu(x) * x) and "KernelUnavailable" in backend.reports[0].notes[0]


def test_keys_above_the_transforms_are_checked(tmp_path):
    with pytest.raises(UnknownKey, match="did you mean 'verify'"):
        load_config({"verfy": "matches"})
    with pytest.raises(ConfigError, match="write kernels"):
        load_config(sets=["kernels=triton"])
    with pytest.raises(ConfigError, match="write verify=structure"):
        load_config(sets=["verify.x=1"])
    (tmp_path / "c.yaml").write_text("false")
    assert read_yaml(tmp_path / "c.yaml") is False
    with pytest.raises(ConfigError, match="a mapping"):
        load_config(tmp_path / "c.yaml")
    for name in ("", ".relative", "no_such_module_anywhere"):
        with pytest.raises(UsageError, match="cannot be used"):
            load_config(plugins=(name,))


def test_nothing_of_the_above_keeps_plain_fusions_from_firing():
    gm = export_graph(Function(lambda g, u: F.silu(g) * u), (torch.randn(2, 8), torch.randn(2, 8)))
    run_pipeline(gm, load_config({"verify": "matches"}))
    assert any(is_op(node, ops.swiglu.default) for node in calls(gm.graph))
