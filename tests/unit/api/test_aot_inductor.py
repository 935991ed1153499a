"""graft's fusions in AOTInductor are those in torch.compile, although exported graphs restate every dtype."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

import graft
from graft.backends.inductor import FUSION_PASS, CachedPass
from graft.backends.inductor_caches import without_caches
from graft.backends.ops_apart import own_ops, take_apart
from graft.base.errors import GraphRefused
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


def fused(compile_with, **settings):
    """How often each transform matched in a compilation that ends behind graft's pass."""
    options = graft.passes_for_inductor(**settings)
    own = options[FUSION_PASS]

    def run(graph):
        own(graph)
        assert "_assert_tensor_metadata" not in str(graph)
        assert ("graft." in str(graph)) != settings.get("standalone", False)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_standalone_package_has_the_fusions_and_none_of_grafts_ops(dtype):
    program = torch.export.export(Norms(dtype).requires_grad_(False), (torch.randn(4, 8, dtype=dtype),))
    found = [fused(partial(packaged, program), standalone=alone) for alone in (False, True)]
    assert found[0] == found[1] == {"fuse_rms_norm": 1, "fuse_layer_norm": 1, "fuse_swiglu": 1}
    needs, alone = (report.notes[0] for report in compilations()[-2:])
    told = "graft::layer_norm (1), graft::rms_norm (1), graft::swiglu (1)"
    assert needs.startswith(f"aot_inductor: the package calls {told}, which Python registers: import graft.ops")
    assert alone == f"standalone: taken apart into the ops of their references, which Inductor compiles: {told}"


def packaged(program, options):
    torch._inductor.aoti_compile_and_package(program, inductor_configs=options)


class Ops(nn.Module):
    """Calls of graft's ops in the program itself: several results, keywords, options, a norm that adds."""

    def forward(self, x, w):
        summed, row = torch.ops.graft.add_rms_norm(x, x * 2, w, 1e-5)
        return torch.ops.graft.swiglu(summed, row, activation="gelu_tanh"), row.t()


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_ops_that_a_program_calls_itself_are_taken_apart_too(mode):
    x, w = torch.randn(4, 8), torch.rand(8)
    graph = make_fx(Ops(), tracing_mode=mode)(x, w)
    assert sum(own_ops(graph.graph).values()) == 2
    found = take_apart(graph.graph)
    graph.recompile()
    assert found == {"graft::add_rms_norm": 1, "graft::swiglu": 1} and not own_ops(graph.graph)
    x = torch.randn(4 if mode == "fake" else 6, 8)
    torch.testing.assert_close(graph(x, w), Ops()(x, w))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(graph(x, w * 1.001), Ops()(x, w))


def test_an_op_that_writes_is_not_taken_apart():
    graph = Graph()
    node = graph.call_function(torch.ops.graft.rope_kv_write.default, (graph.placeholder("x"),))
    graph.output(node)
    with pytest.raises(GraphRefused, match="calls graft::rope_kv_write, which writes its arguments"):
        take_apart(graph)


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
    alone = fused(partial(packaged, program), standalone=True)
    assert alone == aot


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """Packages with graft's ops, with those taken apart, and without, and what the module gives call after call."""
    kinds = {
        "fused": graft.passes_for_inductor(),
        "alone": graft.passes_for_inductor(standalone=True),
        "fixed": graft.fix_functionalization(),
    }
    folder = tmp_path_factory.mktemp("packages")
    torch.manual_seed(0)
    module, x = Norms(torch.float32).requires_grad_(False), torch.ones(4, 8)
    program = torch.export.export(copy.deepcopy(module), (x,))
    with torch.no_grad():
        for name, options in kinds.items():
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
if sys.argv[3] == "fused":
    import graft.ops
package = torch._inductor.aoti_load_package(sys.argv[1])
for _ in range(int(sys.argv[2])):
    print(package(torch.ones(4, 8)).square().sum().item())
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["fused", "alone", "fixed"])
def test_a_package_with_written_buffers_runs_in_a_fresh_process(packages, name):
    folder, expected = packages
    ran = numbers(sys.executable, "-c", IN_PYTHON, str(folder / f"{name}.pt2"), str(CALLS), name)
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
    for name in ("fixed", "alone"):
        ran = numbers(runner, str(folder / f"{name}.pt2"), str(CALLS))
        assert ran.returncode == 0, ran.stderr
        assert [float(line) for line in ran.stdout.split()] == pytest.approx(expected, rel=1e-5)
    ran = numbers(runner, str(folder / "fused.pt2"), str(CALLS))  # graft registers its ops in Python
    assert ran.returncode == 1 and "graft::" in ran.stderr
