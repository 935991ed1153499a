"""The elementwise table: what it says of a call is what torch computes, in Triton as well; the rest has a reason."""

from __future__ import annotations

import linecache

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.ir.nodes import calls
from graft.ir.trace import trace_function
from graft.ops import triton_math
from graft.ops.pointwise import BY_CALL, ROWS, TABLE
from graft.passes.elementwise import Earlier, is_pointwise, steps_of
from marks import examples

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
Y = torch.rand(3, 8, generator=torch.Generator().manual_seed(1)) + 0.5
OTHER = {"gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "clamp": torch.clamp, "silu": F.silu, "gelu": F.gelu}
OTHER |= {"softplus": F.softplus, "relu": F.relu, "to": lambda x, _: x}
NUMBERS = {"clamp": (-0.5, 0.75), "rsub": (2.0,)}


def torch_function(name):
    return OTHER.get(name) or getattr(torch, name)


def kernel(name: str):
    """One program over 32 elements, with the table's expression in it."""
    row = TABLE[name]
    args = ["a", "b"][: sum(kind in "ts" for kind in row.takes)] + [repr(n) for n in NUMBERS.get(name, ())]
    text = (
        "@triton.jit\ndef made(a_ptr, b_ptr, out, count):\n    at = tl.arange(0, 32)\n    mask = at < count\n"
        "    a = tl.load(a_ptr + at, mask=mask, other=1.0)\n    b = tl.load(b_ptr + at, mask=mask, other=1.0)\n"
        f"    tl.store(out + at, {row.triton.format(*args, '')}, mask=mask)\n"
    )
    file = f"<table {name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    helpers = {one.name: getattr(triton_math, one.name) for one in ROWS if one.helper}
    helpers["tanh"] = triton_math.tanh
    space = {"triton": triton, "tl": tl, "__name__": __name__, **helpers}
    exec(compile(text, file, "exec"), space)
    return space["made"]


@pytest.mark.parametrize("name", TABLE)
def test_the_triton_of_every_row_is_what_torch_computes(name):
    left = Y if name in ("log", "sqrt", "rsqrt") else X
    out, wrong = torch.empty_like(left), torch.empty_like(left)
    kernel(name)[(1,)](left, Y, out, left.numel())
    kernel("exp" if name != "exp" else "abs")[(1,)](left, Y, wrong, left.numel())
    given = [left, Y][: sum(kind in "ts" for kind in TABLE[name].takes)]
    wanted = torch_function(name)(*given, *NUMBERS.get(name, ()), *([None] if name == "to" else []))
    torch.testing.assert_close(out, wanted, rtol=2e-6, atol=2e-6)
    assert not torch.allclose(wrong, wanted, rtol=1e-3, atol=1e-3)


def test_a_call_is_in_the_table_once_and_torch_agrees_that_it_is_elementwise():
    assert len(BY_CALL) == sum(len(row.aten) for row in ROWS) and len(TABLE) == len(ROWS)
    assert all(torch.Tag.pointwise in call.tags for call in BY_CALL)


def run_steps(steps, values):
    """What the steps say, in torch."""
    made = []
    for step in steps:
        args = [made[a.index] if isinstance(a, Earlier) else values.get(a, a) for a in step.args]
        made.append(torch_function(step.op)(*args))
    return made[-1]


UNARY = [row.name for row in ROWS if row.takes == "t" and row.aten]
CALLS = st.one_of(
    st.sampled_from(UNARY).map(lambda name: torch_function(name)),
    st.sampled_from([2, 3, 0.5, -0.5, -1]).map(lambda n: lambda x: x.pow(n)),
    st.floats(-4, 4, width=32).map(lambda n: lambda x: x * n),
    st.floats(-4, 4, width=32).map(lambda n: lambda x: n - x),
    st.sampled_from([OTHER["gelu_tanh"], torch.square, lambda x: torch.clamp(x, -0.5, 0.75)]),
)


@settings(deadline=None, max_examples=examples(25))
@given(st.lists(CALLS, min_size=1, max_size=4))
def test_steps_compute_what_the_calls_do(functions):
    def chain(x):
        for function in functions:
            x = function(x)
        return x

    graph = trace_function(chain, (Y,)).graph
    values = {next(iter(graph.nodes)): Y}
    for node in calls(graph):
        steps = steps_of(node)
        assert not isinstance(steps, str), steps
        assert is_pointwise(node)
        values[node] = run_steps(steps, values)
    torch.testing.assert_close(values[node], chain(Y), equal_nan=True)


REFUSED = {
    "unknown op": (torch.erfinv, "%erfinv", "is not an op that can be generated"),
    "random": (lambda x: F.dropout(x, 0.5, True), "%dropout", "which is random"),
    "alpha": (lambda x: torch.add(x, x, alpha=2), "%add", "alpha=2 is not generated"),
    "beta": (lambda x: F.softplus(x, 2.0), "%softplus", "2.0 is not generated"),
    "exponent": (lambda x: x.pow(2.5), "%pow_1", "a power of 2.5"),
    "float64": (lambda x: x.double(), "%to", "in float32, not in torch.float64"),
    "one side": (lambda x: torch.clamp(x, min=0.5), "%clamp", "on one side"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_generated_says_why(name):
    function, at, reason = REFUSED[name]
    (node,) = calls(trace_function(function, (X,)).graph)
    told = steps_of(node)
    assert isinstance(told, str) and told.startswith(at) and reason in told
    assert is_pointwise(node)


def test_what_mixes_elements_is_not_elementwise():
    (node,) = calls(trace_function(lambda x: x.softmax(-1), (X,)).graph)
    assert not is_pointwise(node) and isinstance(steps_of(node), str)
