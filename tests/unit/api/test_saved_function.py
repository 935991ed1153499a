"""Functions that torch.compile(backend="graft") compiles ahead of time: what a loaded one is held against."""

from __future__ import annotations

import io
import warnings

import pytest
import torch
from torch._dynamo.aot_compile import AOTCompiledFunction

import graft
from graft.api import saved_function
from graft.backends.inductor_saved import AHEAD
from graft.base.errors import ArtifactError, GraphRefused, SharedMemoryError, UsageError
from testing_kit_cases import Gated, X

SCALE = 2.0


@pytest.fixture(autouse=True)
def ahead():
    with torch._dynamo.config.patch(AHEAD), torch.no_grad():
        yield


def compiled(function, *args, **settings):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, **{"backend": "graft", **settings}).aot_compile((args, {}))


def doubled(a, b):
    a.mul_(2)
    return a + b


def scaled(x):
    return x * SCALE


@pytest.fixture(scope="module")
def writes():
    with torch._dynamo.config.patch(AHEAD), torch.no_grad():
        return compiled(doubled, torch.ones(4), torch.ones(4))


def test_inputs_that_are_written_share_memory_with_no_other(writes):
    """torch's own function takes them, and gives other numbers than eager."""
    memory, again = torch.arange(8.0), torch.arange(8.0)
    assert torch.equal(writes(memory[:4], memory[4:]), doubled(again[:4], again[4:])) and torch.equal(memory, again)
    with pytest.raises(SharedMemoryError, match=r"^a is written and shares memory with b,"):
        writes(memory[:4], memory[1:5])
    assert torch.equal(memory, again)


def test_a_graph_whose_inputs_share_memory_is_not_saved():
    memory = torch.ones(8)
    no_transform = pytest.warns(UserWarning, match="is written in place and shares its memory with another input")
    with (
        no_transform,
        pytest.raises(Exception, match="this graph cannot be saved with its function: inputs share memory") as found,
    ):
        compiled(doubled, memory[:4], memory[1:5])
    assert isinstance(getattr(found.value, "inner_exception", found.value), GraphRefused)


def test_guards_on_globals_are_told():
    with pytest.warns(UserWarning, match=r"a saved function does not check G\['SCALE'\] == 2.0; make them arguments"):
        function = compiled(scaled, X, options={"guard_filter_fn": graft.portable_guards})
    assert saved_function.GLOBALS_NOTE in graft.backend_reports()[-1].notes
    assert torch.equal(function(X), X * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = compiled(lambda x, k: x * k, X, 3, options={"guard_filter_fn": graft.portable_guards})
    assert torch.equal(other(X, 3), X * 3)
    with pytest.raises(RuntimeError, match=r"(?s)GuardManager check failed.*'k.*'\] == 3"):
        other(X, 4)


def saved(function):
    return AOTCompiledFunction.serialize(function).serialized_data


def test_a_loaded_function_brings_its_report():
    torch.compiler.reset()
    module = Gated()
    function = torch.compile(module, fullgraph=True, backend="graft").forward.aot_compile(((X,), {}))
    before = len(saved_function.loaded_reports)
    again = AOTCompiledFunction.deserialize(saved(function))
    assert torch.equal(again(module, X), function(module, X))
    (report,) = saved_function.loaded_reports[before:]
    assert len(report.transforms["fuse_swiglu"].matches) == 1 and report in graft.backend_reports()


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("torch", "2.0.0", r"it was compiled by torch 2\.0\.0, and this is .*; compile it again"),
        ("ops", {"nobody::op": ""}, r"it calls nobody::op, which nothing here defines; first import what does"),
        ("ops", {"graft::swiglu": "other"}, r"it was compiled for other, and here that op is graft::swiglu\("),
    ],
)
def test_a_function_of_another_place_is_refused(writes, monkeypatch, field, value, told):
    head = {**vars(next(iter(headers(writes)))), field: value}
    monkeypatch.setattr(saved_function, "from_bytes", lambda code: pytest.fail("its code was read"))
    content = saved_function.json.dumps(head).encode() + b"\n" + b"code"
    with pytest.raises(ArtifactError, match=told):
        saved_function.SavedFunction.deserialize_compile_artifacts(content)


def headers(function):
    found = saved_function.SavedFunction.serialize_compile_artifacts(function._artifacts.compiled_fn)
    head = saved_function.json.loads(io.BytesIO(found).readline())
    yield saved_function.SavedHeader(**head)


def test_kernels_that_are_bound_are_not_saved():
    with pytest.raises(Exception, match=r"Backend\(inductor=False\) gives nothing that torch can save") as found:
        compiled(scaled, X, backend=graft.Backend(inductor=False))
    assert isinstance(getattr(found.value, "inner_exception", found.value), UsageError)
