"""Saved modules: outputs, state, aliases and report survive a new process."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

import graft
from artifact_models import LOAD, Decoder, decoder_call, decoder_shapes
from graft.api.artifact import Artifact, SavedGraph, read_artifact, write_artifact
from graft.base.errors import UsageError
from graft.ir.edit import attach_state
from graft.ir.io.symbols import symbols_of
from graft.ir.io.text import graph_text
from graft.ir.nodes import tensor_val
from graft.ir.program.signature import Leaf, Signature, read_signature
from graft.ir.trace import export_graph
from graft.ir.verify import verify
from graft.passes.report import Report
from marks import short
from processes import run_python

PATHS = [str(Path(graft.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, PATHS)), "OMP_NUM_THREADS": "1"}


def assert_same(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def compiled_decoder(backend="eager"):
    args, kwargs = decoder_call()
    return graft.compile(Decoder().eval(), args, kwargs, dynamic_shapes=decoder_shapes(), backend=backend)


def not_looked_up(note):
    return not note.startswith("Inductor's caches: ")


def run(module, calls):
    return [module(*args, **kwargs) for args, kwargs in calls]


def buffers(module):
    return {name: tensor.clone() for name, tensor in module.graph_module.named_buffers()}


@pytest.mark.parametrize("backend", short(["eager", "inductor"], "eager"))
def test_a_new_process_goes_on_from_the_saved_state(tmp_path, backend):
    compiled = compiled_decoder(backend)
    initial = buffers(compiled)
    run(compiled, [decoder_call(step=0), decoder_call(3, 5, step=1)])
    compiled.save(tmp_path / "saved")
    calls = [decoder_call(step=2), decoder_call(5, 9, step=3)]
    torch.save(calls, tmp_path / "calls.pt")
    files = [tmp_path / name for name in ("saved", "calls.pt", "out.pt")]
    done = run_python("-c", LOAD, *files, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    result = torch.load(tmp_path / "out.pt")
    expected = run(compiled, calls)
    if backend == "eager":
        assert_same(result["outputs"], expected)
    else:
        torch.testing.assert_close(result["outputs"], expected)
    assert_same(result["state"]["attn.steps"], torch.tensor(4))
    torch.testing.assert_close(result["state"], buffers(compiled))
    loaded, own = Report.from_json(result["report"]), compiled.report
    assert replace(loaded, notes=()) == replace(own, notes=())
    assert [*filter(not_looked_up, loaded.notes)] == [*filter(not_looked_up, own.notes)]
    assert len(loaded.notes) == len(own.notes), "of Inductor's caches each process says what it found itself"
    assert result["aliases"] == [(alias.output, alias.input, alias.kind) for alias in compiled.aliases]
    assert [kind for _, name, kind in result["aliases"] if name == "attn.cache"] == ["kv_cache_update"]
    assert result["backend"] == backend
    assert_same(result["reset"], initial)


def test_the_loaded_graph_is_the_saved_graph(tmp_path):
    compiled = compiled_decoder()
    targets = {str(node.target) for node in compiled.graph_module.graph.nodes}
    assert {"graft.rms_norm.default", "graft.swiglu.default"} <= targets
    compiled.save(tmp_path / "saved")
    loaded = graft.load(tmp_path / "saved")
    assert graph_text(loaded.graph_module.graph) == graph_text(compiled.graph_module.graph)
    assert loaded.graph_module.code == compiled.graph_module.code
    assert loaded.graph_module.state_dict().keys() == compiled.graph_module.state_dict().keys()
    assert "attn.steps" not in loaded.graph_module.state_dict()  # still not persistent
    for left, right in zip(loaded.graph_module.graph.nodes, compiled.graph_module.graph.nodes, strict=True):
        a, b = tensor_val(left), tensor_val(right)
        if b is not None:
            assert str((a.stride(), a.storage_offset(), a.device)) == str((b.stride(), b.storage_offset(), b.device))
    verify(loaded.graph_module)  # abstract values compute again, from symbols with the same ranges
    assert loaded.variants[0].signature == compiled.variants[0].signature
    symbols = symbols_of(node.meta.get("val") for node in loaded.graph_module.graph.nodes)
    assert {(s.lower, s.upper, s.hint) for s in symbols} >= {(2, 64, 2)}


def test_sizes_stay_dynamic_and_others_are_refused_as_before(tmp_path):
    compiled = compiled_decoder()
    compiled.save(tmp_path / "saved")
    loaded = graft.load(tmp_path / "saved")
    for batch, length in ((2, 3), (7, 11), (3, 64)):
        args, kwargs = decoder_call(batch, length)
        assert_same(loaded(*args, **kwargs), compiled(*args, **kwargs))
    args, kwargs = decoder_call()
    with pytest.raises(UsageError, match="keyword"):
        loaded(*args)
    with pytest.raises(UsageError, match="shape"):
        loaded(args[0][..., :8], args[1], **kwargs)


def test_reset_brings_the_initial_values_back_after_loading(tmp_path):
    compiled = compiled_decoder()
    first = run(compiled, [decoder_call(step=i) for i in range(2)])
    compiled.save(tmp_path / "saved")
    loaded = graft.load(tmp_path / "saved")
    loaded.reset()
    assert_same(run(loaded, [decoder_call(step=i) for i in range(2)]), first)
    compiled.save(tmp_path / "saved", overwrite=True)
    again = graft.load(tmp_path / "saved")
    again.save(tmp_path / "second")
    assert_same(buffers(graft.load(tmp_path / "second")), buffers(compiled))


class Tied(nn.Module):
    """Embedding and head share a weight; a strided buffer, an expanded one, and two windows on one memory."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, False)
        self.head.weight = self.embed.weight
        memory = torch.zeros(2, 6)
        self.register_buffer("left", memory[:, :4])
        self.register_buffer("right", memory[:, 2:])
        self.register_buffer("transposed", torch.arange(12.0).reshape(3, 4).t())
        self.register_buffer("wide", torch.ones(1, 4).expand(2, 4))

    def forward(self, ids):
        self.left.add_(1)
        return self.head(self.embed(ids)) + self.right.sum(), self.transposed * 2, self.wide + 1


def test_ties_strides_and_shared_memory_are_kept(tmp_path):
    compiled = graft.compile(Tied().eval(), (torch.tensor([1, 2]),))
    attach_state(compiled.graph_module, "embed.weight", compiled.graph_module.head.weight)  # export keeps one name
    compiled.save(tmp_path / "saved")
    loaded = graft.load(tmp_path / "saved")
    gm = loaded.graph_module
    assert (gm.transposed.stride(), gm.wide.stride()) == ((1, 4), (0, 1))
    for _ in range(2):
        assert_same(loaded(torch.tensor([1, 2])), compiled(torch.tensor([1, 2])))
    assert gm.right[:, :2].unique().item() == 2.0  # a write through `left` is seen through `right`
    assert gm.get_parameter("embed.weight") is gm.get_parameter("head.weight")
    header = (tmp_path / "saved" / "weights.safetensors").read_bytes()
    assert (b"embed.weight" in header) + (b"head.weight" in header) == 1  # stored once


def test_classes_of_transformers_come_back(tmp_path):
    class Head(nn.Module):
        def forward(self, x):
            return CausalLMOutputWithPast(logits=x * 2, past_key_values=((x, x + 1),))

    compiled = graft.compile(Head(), (torch.ones(2),))
    compiled.save(tmp_path / "saved")
    script = (
        "import sys, graft, torch; out = graft.load(sys.argv[1])(torch.ones(2));"
        " assert type(out).__name__ == 'CausalLMOutputWithPast' and out.past_key_values[0][1].sum() == 4, out"
    )
    done = run_python("-c", script, tmp_path / "saved", env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Module()
        self.inner.register_buffer("count", torch.zeros(3))
        self.weight = nn.Parameter(torch.randn(16))

    def forward(self, x, cache):
        self.inner.count.add_(x[0, :3])
        cache[:, 1].copy_(x)
        h = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
        return h + self.inner.count.sum(), self.inner.count


def counter_call(step=0):
    return torch.full((2, 16), step + 1.0), torch.zeros(2, 4, 16)


@pytest.mark.parametrize("backend", short(["eager", "inductor"], "eager"))
def test_torch_export_of_a_compiled_module_keeps_its_state(tmp_path, backend):
    module, eager = Counter(), Counter()
    eager.load_state_dict(module.state_dict())
    compiled = graft.compile(module, counter_call(), backend=backend)
    program = torch.export.export(compiled, counter_call())
    targets = [spec.target for spec in program.graph_signature.input_specs if spec.target]
    assert sorted(targets) == ["graph_module.inner.count", "graph_module.weight"]  # each once
    assert list(program.run_decompositions().graph_signature.buffers_to_mutate.values()) == [
        "graph_module.inner.count"
    ]
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    recompiled = graft.compile(torch.export.load(tmp_path / "program.pt2").module(), counter_call())
    recompiled.save(tmp_path / "saved")
    again = graft.load(tmp_path / "saved")
    for step in range(3):
        expected_args = counter_call(step)
        expected = eager(*expected_args)
        for candidate in (loaded, recompiled, again):
            args = counter_call(step)
            torch.testing.assert_close(tuple(candidate(*args)), expected)
            assert_same(args, expected_args)
    assert_same(dict(loaded.named_buffers()).popitem()[1], eager.inner.count)
    again.reset()
    assert again.graph_module.get_buffer(next(iter(again.initial))).count_nonzero() == 0


def test_torch_export_of_a_compiled_module_may_be_dynamic():
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(4))

        def forward(self, x):
            self.total.add_(x.sum(0))
            return x - self.total

    rows = {0: torch.export.Dim.DYNAMIC}
    compiled = graft.compile(Sums(), (torch.randn(3, 4),), dynamic_shapes={"x": rows})
    program = torch.export.export(compiled, (torch.randn(3, 4),), dynamic_shapes={"args": (rows,)})
    loaded, eager = program.module(), Sums()
    for count in (3, 8, 5):
        x = torch.randn(count, 4)
        assert_same(loaded(x), eager(x))


def test_an_artifact_is_plain_data(tmp_path):
    gm = export_graph(Counter(), counter_call())
    aliases = (("getitem", "cache", "kv_cache_update"), (None, "inner.count", "user"))
    extra = {"fixed": [1, "a", None]}
    kernels = {"rms_norm": "reference"}
    signature = Signature(
        (Leaf("x", "float32", "cpu", (2, "s0")), Leaf("n", value=3)), ("Ne(s0, 1)",), {"s0": (0, 9)}
    )
    graph = SavedGraph(gm, signature, aliases, '{"a": 1}', {"returned": []})
    write_artifact(tmp_path / "saved", Artifact((graph,), "eager", kernels, {}, extra))
    read = read_artifact(tmp_path / "saved")
    assert (read.backend, read.kernels, read.extra, read.notes) == ("eager", kernels, extra, ())
    (found,) = read.graphs
    assert (found.signature, found.aliases, found.report, found.extra) == (
        signature, aliases, '{"a": 1}', {"returned": []})  # fmt: skip


def test_fixed_and_symbolic_numbers_are_inputs_too(tmp_path):
    class Numbers(nn.Module):
        def forward(self, x, n, *, mode="a", eps=1e-5, none=None):
            return x[:n] * eps, x.new_zeros(n // 2, x.shape[0] + n), max(n, 3)

    dim = torch.export.Dim
    args, kwargs = (torch.randn(9), 4), {"mode": "a", "eps": 0.5, "none": None}
    shapes = {"x": {0: dim("k", min=8, max=50)}, "n": dim.DYNAMIC, "mode": None, "eps": None, "none": None}
    gm = export_graph(Numbers(), args, kwargs, shapes)
    given = [*args, *kwargs.values()]
    signature = read_signature(gm, given, ["x", "n", *kwargs])
    write_artifact(tmp_path / "saved", Artifact((SavedGraph(gm, signature),)))
    (read,) = read_artifact(tmp_path / "saved").graphs
    leaves = {leaf.name: leaf for leaf in read.signature.leaves}
    assert leaves["n"].symbolic and leaves["mode"].value == "a" and leaves["eps"].value == 0.5
    assert (8, 50) in read.signature.ranges.values()
    assert graph_text(read.graph_module.graph) == graph_text(gm.graph)
    for size, n in ((9, 4), (30, 7)):
        x = torch.randn(size)
        read.signature.check([x, n, *kwargs.values()])
        assert_same(read.graph_module(x, n, **kwargs), gm(x, n, **kwargs))


def test_every_variant_is_saved_and_they_share_one_state(tmp_path):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x):
            self.steps += 1
            return self.linear(x) * (3 if x.shape[0] == 1 else 2) + self.steps

    module = Branches().eval()
    compiled = graft.compile(module, (torch.randn(3, 4),), dynamic_shapes={"x": {0: torch.export.Dim.DYNAMIC}})
    compiled(torch.randn(1, 4))
    assert len(compiled.variants) == 2
    compiled.save(tmp_path / "saved")
    loaded = graft.load(tmp_path / "saved")
    assert (tmp_path / "saved" / "graph_2.json").is_file() and len(loaded.variants) == 2
    with torch.no_grad():
        for size in (5, 1, 1, 2):
            x = torch.randn(size, 4)
            torch.testing.assert_close(loaded(x), module(x))
    assert loaded.steps == module.steps == 5
    loaded.reset()
    assert loaded.steps == 0 and module.steps == 5
    unseen = graft.compile(
        Branches().eval(), (torch.randn(3, 4),), dynamic_shapes={"x": {0: torch.export.Dim.DYNAMIC}}
    )
    unseen.save(tmp_path / "unseen")
    with pytest.raises(UsageError, match="a loaded module or an exported program cannot be captured again"):
        graft.load(tmp_path / "unseen")(torch.randn(1, 4))


@pytest.mark.parametrize("text", ["__import__('os')", "(1).__class__", "[s0 for s0 in (1,)]", "~(s0 > 1)", "s0 >"])
def test_expressions_of_sizes_run_no_code(text):
    from graft.base.errors import CaptureError

    signature = Signature((Leaf("x", "float32", "cpu", ("s0",)),), (text,))
    with pytest.raises(CaptureError, match="expression"):
        signature.check([torch.zeros(3)])
