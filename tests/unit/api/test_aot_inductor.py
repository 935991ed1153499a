"""graft's fusions in AOTInductor are those in torch.compile, although exported graphs restate every dtype."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graft
from graft.backends.inductor import FUSION_PASS, CachedPass
from graft.backends.inductor_caches import without_caches
from graft.models.load import load_model
from graft.models.registry import families
from inductor_cases import compilations

RUNNER = Path(__file__).with_name("aoti_runner.cpp")
CALLS = 3


class Norms(nn.Module):
    """RMSNorm with casts, as Hugging Face writes it, then a gated MLP and a layer norm."""

    def __init__(self, dtype):
        super().__init__()
        self.w = nn.Parameter(torch.rand(8, dtype=dtype))
        self.gate, self.up = nn.Linear(8, 16, dtype=dtype), nn.Linear(8, 16, dtype=dtype)
        self.norm = nn.LayerNorm(16, dtype=dtype)
        self.register_buffer("seen", torch.zeros(3, dtype=dtype))

    def forward(self, x):
        h = x.float()
        h = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.w
        self.seen.add_(1)
        return self.norm(F.silu(self.gate(h)) * self.up(h)) + self.seen[0]


class Stopped(Exception):
    """Raised where Inductor would go on to generate code, which takes half a minute."""


def fused(compile_with):
    """How often each transform matched in a compilation that ends behind graft's pass."""
    options = graft.passes_for_inductor()
    own = options[FUSION_PASS]

    def run(graph):
        own(graph)
        assert "_assert_tensor_metadata" not in str(graph)
        graph.lint()
        raise Stopped

    before = len(compilations())
    with torch.no_grad(), without_caches(), pytest.raises(Exception, match="Stopped"):
        compile_with({**options, FUSION_PASS: CachedPass("stops", run)})
    report = compilations()[before]
    return {name: len(record.matches) for name, record in report.transforms.items() if record.matches}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_aot_inductor_fuses_what_torch_compile_fuses(dtype):
    module, x = Norms(dtype).requires_grad_(False), torch.randn(4, 8, dtype=dtype)
    program = torch.export.export(module, (x,))
    aot = fused(lambda options: torch._inductor.aoti_compile_and_package(program, inductor_configs=options))
    torch._dynamo.reset()
    jit = fused(lambda options: torch.compile(module, options=options)(x))
    assert aot == jit and aot["fuse_rms_norm"] == 1


class Branches(nn.Module):
    """More parameters than its branches have inputs; one of them is a norm's, and a computed tensor is another's."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.rand(8)) for _ in range(5)])

    def forward(self, x):
        operands = x, self.weights[4], self.weights[0] * x.sum()
        y = torch.cond(x.sum() > 0, normed, lambda x, w, v: x * w * v, operands)
        return sum(self.weights, y)


def normed(x, w, v):
    by_norm = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return by_norm * w + (x + 1) * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + 1e-5) * v


def test_branches_know_which_of_their_inputs_are_parameters():
    """Inductor works on them first; the positions of parameters that it has are those of the outermost graph."""
    module, x = Branches().requires_grad_(False), torch.randn(4, 8)
    program = torch.export.export(module, (x,))
    aot = fused(lambda options: torch._inductor.aoti_compile_and_package(program, inductor_configs=options))
    torch._dynamo.reset()
    jit = fused(lambda options: torch.compile(module, options=options)(x))
    assert aot == jit == {"fuse_rms_norm": 1}


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", families())
def test_every_family_fuses_the_same_on_both(family):
    model, ids = load_model(f"tiny-{family}", dtype="float32").module, torch.arange(1, 8)[None]
    program = torch.export.export(model, (ids,), {"use_cache": False})
    aot = fused(lambda options: torch._inductor.aoti_compile_and_package(program, inductor_configs=options))
    torch._dynamo.reset()
    jit = fused(lambda options: torch.compile(model, options=options)(ids, use_cache=False))
    assert aot == jit and aot


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A package with graft's ops and one without, and what the module gives call after call."""
    folder = tmp_path_factory.mktemp("packages")
    torch.manual_seed(0)
    module, x = Norms(torch.float32).requires_grad_(False), torch.ones(4, 8)
    program = torch.export.export(copy.deepcopy(module), (x,))
    with torch.no_grad():
        for name, options in (("fused", graft.passes_for_inductor()), ("fixed", graft.fix_functionalization())):
            path = str(folder / f"{name}.pt2")
            torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=options)
        return folder, [module(x).square().sum().item() for _ in range(CALLS)]


def numbers(*command):
    """LD_LIBRARY_PATH: a package names libtorch.so, which a runner linked with --as-needed has not loaded."""
    libraries = str(Path(torch.__file__).parent / "lib")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "LD_LIBRARY_PATH": libraries}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


IN_PYTHON = """
import sys, torch
import graft.ops
package = torch._inductor.aoti_load_package(sys.argv[1])
for _ in range(int(sys.argv[2])):
    print(package(torch.ones(4, 8)).square().sum().item())
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["fused", "fixed"])
def test_a_package_with_written_buffers_runs_in_a_fresh_process(packages, name):
    folder, expected = packages
    ran = numbers(sys.executable, "-c", IN_PYTHON, str(folder / f"{name}.pt2"), str(CALLS))
    assert ran.returncode == 0, ran.stderr
    assert [float(line) for line in ran.stdout.split()] == pytest.approx(expected, rel=1e-5)
    assert expected[0] != pytest.approx(expected[1], rel=1e-5)  # the buffer is seen


class Counters(nn.Module):
    """Buffers of one element: a counter that says where to write, one without dims, and one with several."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(16, 4))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("bias", torch.full((1, 1), 3.0))

    def forward(self, x):
        self.cache.index_copy_(0, self.steps, x * self.scale)
        self.steps.add_(1)
        self.scale.mul_(2)
        self.bias.copy_(self.bias + self.steps)
        return self.cache.sum(0) + self.bias


def folded(options):
    """The graph behind Inductor's constant folding, as text."""
    seen = []

    def see(graph):
        seen.append(str(graph))
        raise Stopped

    program = torch.export.export(Counters(), (torch.ones(1, 4),))
    with torch.no_grad(), without_caches(), pytest.raises(Exception, match="Stopped"):
        passes = {**options, FUSION_PASS: CachedPass("sees", see)}
        torch._inductor.aoti_compile_and_package(program, inductor_configs=passes)
    return seen[0]


def test_a_written_buffer_of_one_element_is_no_constant():
    assert "aten.full.default](args = ([1], 1)" in folded({})  # what stock Inductor writes into `steps`
    graph = folded(graft.fix_functionalization())
    assert "aten.full.default" not in graph and "aten.copy_.default](args = (%steps, %add" in graph


@pytest.mark.exhaustive
def test_a_package_counts(tmp_path):
    program, eager = torch.export.export(Counters(), (torch.ones(1, 4),)), Counters()
    path = str(tmp_path / "counters.pt2")
    options = graft.fix_functionalization()
    torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=options)
    package = torch._inductor.aoti_load_package(path)
    for step in range(4):
        torch.testing.assert_close(package(torch.full((1, 4), step + 1.0)), eager(torch.full((1, 4), step + 1.0)))


@pytest.mark.exhaustive
def test_a_package_runs_without_python_where_it_has_no_ops_of_grafts(packages, tmp_path):
    from torch.utils.cpp_extension import is_ninja_available, load

    if not is_ninja_available():
        pytest.skip("torch builds C++ with ninja, which is not here")
    folder, expected = packages
    runner = load(
        "aoti_runner",
        [str(RUNNER)],
        extra_cflags=["-O0"],
        build_directory=str(tmp_path),
        is_python_module=False,
        is_standalone=True,
    )
    ran = numbers(runner, str(folder / "fixed.pt2"), str(CALLS))
    assert ran.returncode == 0, ran.stderr
    assert [float(line) for line in ran.stdout.split()] == pytest.approx(expected, rel=1e-5)
    ran = numbers(runner, str(folder / "fused.pt2"), str(CALLS))  # graft registers its ops in Python
    assert ran.returncode == 1 and "graft::" in ran.stderr
