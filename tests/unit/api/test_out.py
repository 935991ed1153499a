"""compiled.signature, and results in memory that the caller brings (`out=`)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx
from typer.testing import CliRunner

import graft
from graft.api.checks import check_memory
from graft.base.errors import OutRefused, SharedMemoryError, UsageError
from graft.cli.app import app
from graft.memory.write_through import why_copied, write_through
from marks import examples, short


class Step(nn.Module):
    """A counter, a cache of the caller's, a dict of results, one of them a view of the cache."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("w", torch.randn(8, 8))

    def forward(self, x, cache, pos):
        self.calls.add_(1)
        cache.index_copy_(1, pos, x[:1, None])
        y = x @ self.w
        return {"y": y, "more": (torch.cat([y, y]), cache[:, :2])}


SIZES = {"x": {0: Dim("batch", max=64)}, "cache": {}, "pos": None}


def inputs(rows=3):
    return torch.randn(rows, 8), torch.zeros(1, 16, 8), torch.tensor([2])


def test_the_signature_says_names_sizes_and_whose_memory(tmp_path):
    compiled = graft.compile(Step(), inputs(), dynamic_shapes=SIZES)
    assert str(compiled.signature).splitlines() == [
        "input   x                float32[batch, 8] on cpu",
        "input   cache            float32[1, 16, 8] on cpu  written by %index_copy_ (kv_cache_update)",
        "input   pos              int64[1] on cpu",
        "state   calls            float32[1] on cpu  written by %add_ (user)",
        "result  result.y         float32[batch, 8] on cpu",
        "result  result.more[0]   float32[2*batch, 8] on cpu",
        "result  result.more[1]   float32[1, 2, 8] on cpu  in the memory of cache (kv_cache_update)",
        "size    batch            dim 0 of x, from 0 to 64",
    ]
    assert [entry.name for entry in compiled.signature.state] == ["calls"]
    assert compiled.signature.results[1].sizes == ("2*batch", 8)
    compiled.save(tmp_path / "saved")
    assert graft.load(tmp_path / "saved").signature == compiled.signature
    told = CliRunner().invoke(app, ["explain", str(tmp_path / "saved")])
    assert told.exit_code == 0 and "float32[2*batch, 8] on cpu" in told.output


def test_sizes_without_a_name_say_where_they_are_bound():
    compiled = graft.compile(lambda x: x * 2, (torch.ones(4, 2),), dynamic_shapes=({0: Dim.DYNAMIC},))
    (symbol,) = compiled.signature.sizes
    assert (
        compiled.signature.sizes[symbol].startswith("dim 0 of x") and compiled.signature.results[0].sizes[0] == symbol
    )
    table = graft.compile(lambda x: (x.mT, 3), (torch.ones(4, 2),)).signature
    assert [(r.name, r.dtype, r.alias, r.kind) for r in table.results] == [
        ("result[0]", "float32", "x", "view"),
        ("result[1]", "int", "", ""),
    ]


def test_explain_prints_the_engines_graph():
    told = CliRunner().invoke(app, ["explain", "tiny-llama"])
    assert told.exit_code == 0
    line = next(line for line in told.output.splitlines() if "k_cache_0" in line)
    assert "kv_cache_update" in line and "input" in line


@pytest.mark.parametrize("backend", short(["eager", "cuda_graph", "inductor"], "eager", "cuda_graph"))
def test_results_are_written_into_out(backend):
    module, (x, cache, pos) = Step(), inputs()
    compiled = graft.compile(module, (x, cache, pos), dynamic_shapes=SIZES, backend=backend)
    for rows in (3, 5):
        x = torch.randn(rows, 8)
        wanted = compiled(x, cache, pos)
        out = {"y": torch.empty(rows, 8), "more": (torch.empty(2 * rows, 8), None)}
        got = compiled(x, cache, pos, out=out)
        assert got["y"] is out["y"] and got["more"][0] is out["more"][0]
        assert torch.equal(got["y"], wanted["y"]) and torch.equal(got["more"][0], wanted["more"][0])
        assert got["more"][1].data_ptr() == cache.data_ptr()
    assert float(module.calls) == 4


def test_eager_computes_in_out_itself_and_copies_where_it_lies_otherwise():
    compiled = graft.compile(lambda x: x.exp() @ x, (torch.randn(8, 8),))
    x, out = torch.randn(8, 8), torch.empty(8, 8)
    pieces = []
    for brought in (out, torch.empty(8, 8).t()):
        assert torch.equal(compiled(x, out=brought), x.exp() @ x)
        pieces.append(list(compiled.variants[0].filled.values())[-1].call.code)
    assert "copy_" not in pieces[0] and ".out(" in pieces[0]
    assert "copy_" in pieces[1]


def test_out_that_cannot_be_written_is_refused_before_anything_runs():
    module, (x, cache, pos) = Step(), inputs()
    compiled = graft.compile(module, (x, cache, pos), dynamic_shapes=SIZES)
    expanded = torch.empty(1, 8).expand(3, 8)
    for y, problem, kind in (
        (torch.empty(4, 8), r"out.y has the shape \(4, 8\), but its result has \(3, 8\)", OutRefused),
        (torch.empty(3, 8).double(), "float64 on cpu, but its result is torch.float32", OutRefused),
        (torch.empty(3, 8, requires_grad=True), "requires gradients", OutRefused),
        (3, "is no tensor", OutRefused),
        (x, "out.y is written and shares memory with x", SharedMemoryError),
        (cache[0, :3], "shares memory with cache", SharedMemoryError),
        (module.w[:3], "shares memory with a weight or buffer", SharedMemoryError),
        (expanded, "several of its elements share one address", UsageError),
    ):
        with pytest.raises(kind, match=problem):
            compiled(x, cache, pos, out={"y": y, "more": (None, None)})
    with pytest.raises(OutRefused, match=r"out holds out\[0\], but results are out.y"):
        compiled(x, cache, pos, out=(None,))
    assert float(module.calls) == 0
    shared = torch.empty(9, 8)
    with pytest.raises(SharedMemoryError, match=r"out.y.*out.more\[0\]"):
        compiled(x, cache, pos, out={"y": shared[:3], "more": (shared[2:8], None)})
    honoured = graft.compile(lambda x: x * 2, (torch.ones(2),), grad="honour")
    with pytest.raises(OutRefused, match="grad='honour'"):
        honoured(torch.ones(2), out=torch.empty(2))
    nonzero = graft.compile(lambda x: x.nonzero(), (torch.ones(2),))
    with pytest.raises(OutRefused, match="known only when it has run"):
        nonzero(torch.ones(2), out=torch.empty(2, 1, dtype=torch.int64))


def changes_what_it_copied(cache, x):
    new = x * 2
    cache.copy_(new)
    new.add_(1)
    return new.sum()


def changes_a_part_of_what_it_copied(cache, x):
    new = x * 2
    cache.copy_(new)
    new.view(-1)[:1].add_(1)
    return new.sum()


@pytest.mark.parametrize("program", [changes_what_it_copied, changes_a_part_of_what_it_copied])
def test_out_changes_nothing_about_what_the_program_writes_itself(program):
    x, right, own = torch.ones(3), torch.zeros(3), torch.zeros(3)
    compiled = graft.compile(program, (torch.zeros(3), x), backend="eager")
    wanted, total = program(right, x), torch.empty(())
    assert compiled(own, x, out=total) is total
    assert torch.equal(own, right) and torch.equal(total, wanted)


def over(array, part):
    """A tensor with a storage of its own over a part of the array's memory."""
    return torch.from_numpy(array[part])


def test_memory_that_two_storages_share_is_found():
    array = np.arange(16, dtype=np.float32)
    compiled = graft.compile(lambda x: x.flip(0) + 1, (torch.ones(4),), backend="eager")
    own = over(array, slice(4, 8))
    for _ in range(2):  # the second call knows `own`
        assert compiled(torch.ones(4), out=own) is own
        for start in (1, 4, 7):
            with pytest.raises(SharedMemoryError, match="out is written and shares memory with x"):
                compiled(over(array, slice(start, start + 4)), out=own)
        for apart in (slice(0, 4), slice(8, 12)):
            assert torch.equal(compiled(x := over(array, apart), out=own), x.flip(0) + 1)
    even, odd = over(array, slice(0, 8, 2)), over(array, slice(1, 9, 2))
    assert torch.equal(compiled(even, out=odd), even.flip(0) + 1)
    module = nn.Linear(4, 4, bias=False).requires_grad_(False)
    module.weight = nn.Parameter(over(array, slice(0, 16)).view(4, 4), requires_grad=False)
    with pytest.raises(SharedMemoryError):
        graft.compile(module, (torch.ones(4),), backend="eager")(torch.ones(4), out=own)
    donating = graft.compile(lambda s, y: (s + 1, y * 3), (torch.ones(4), torch.ones(4)), donate=("s",))
    with pytest.raises(SharedMemoryError, match="s is written and shares memory with y"):
        donating(own, over(array, slice(4, 8)))


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6), st.integers(1, 4)), min_size=2, max_size=5))
def test_parts_of_one_array_are_refused_where_they_hold_one_element(parts):
    """Parts that lie one after the other always pass; interleaved ones where strides prove that they are apart."""
    array = np.zeros(64, dtype=np.float32)
    spans = [range(start, start + (size - 1) * step + 1, step) for start, size, step in parts]
    tensors = [over(array, slice(span.start, span.stop, span.step)) for span in spans]
    first, others = spans[0], spans[1:]
    shared = any(set(first) & set(other) for other in others)
    apart = all(first.stop <= other.start or other.stop <= first.start for other in others)
    try:
        check_memory(tensors, [str(span) for span in spans], [0], [])
    except SharedMemoryError:
        assert not apart
    else:
        assert not shared


def test_out_is_refused_where_the_call_is_traced():
    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = graft.compile(lambda x: x * 2, (torch.ones(3),), backend="eager")

        def forward(self, x, own):
            self.inner(x, out=own)
            return own + 1

    with torch.no_grad(), pytest.raises(OutRefused, match=r"torch\.export"):
        torch.export.export(Calls(), (torch.ones(3), torch.zeros(3)), strict=False)


def checked_before_it_is_written(x, size):
    new = x * 2
    torch._assert_async(size < 5, "too large")
    return new


@pytest.mark.parametrize("into", [None, torch.zeros(3)])
def test_nothing_is_written_before_a_check_that_comes_first(into):
    x = torch.ones(3)
    donated, out = (("x",), {}) if into is None else ((), {"out": into})
    compiled = graft.compile(checked_before_it_is_written, (x, torch.tensor(1)), backend="eager", donate=donated)
    with pytest.raises(RuntimeError, match="too large"):
        compiled(x, torch.tensor(9), **out)
    assert torch.equal(x, torch.ones(3)) and (into is None or not into.any())
    assert torch.equal(compiled(x, torch.tensor(1), **out), torch.full((3,), 2.0))


def graph_that_copies(program):
    """Its graph as it was traced, written in terms of ATen, and the input `c` that it copies over."""
    graph = make_fx(program)(torch.zeros(3), torch.ones(3)).graph
    into = next(iter(graph.nodes))
    (copy,) = [node for node in graph.nodes if node.target is torch.ops.aten.copy_.default]
    return graph, into, copy


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (changes_what_it_copied, "writes to %mul after it is copied"),
        (changes_a_part_of_what_it_copied, "after it is copied"),
        (lambda c, x: (n := x * 2, c.copy_(n), n.as_strided((2,), (1,), 1).sum())[2], "by its address"),
        (lambda c, x: (n := x * 2, c.copy_(n), n.sum())[2], None),
    ],
)
def test_a_value_that_is_changed_after_its_copy_is_not_computed_in_the_destination(program, reason):
    graph, into, copy = graph_that_copies(program)
    why = why_copied(graph, copy)
    assert (reason is None and why is None) or (reason is not None and reason in str(why))
    assert bool(write_through(graph, {into})) == (reason is None)


def test_a_program_with_an_argument_named_out_keeps_it():
    def add(x, out):
        return x + out

    compiled = graft.compile(add, (torch.ones(2), torch.ones(2)))
    assert torch.equal(compiled(torch.ones(2), out=torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(64,), (8, 64), (2, 8, 64), (2, 3, 8, 64)])
def test_linear_and_matmul_have_the_same_bits_in_out(sizes, dtype, recwarn):
    weight, bias, x = (torch.randn(*size, dtype=dtype) for size in ((48, 64), (48,), sizes))

    def program(x):
        return nn.functional.linear(x, weight, bias), nn.functional.linear(x, weight), x @ weight.t()

    config = {"transforms": {"widen_linear": {"enabled": False}}}  # which changes linear on a CPU without bfloat16
    compiled = graft.compile(program, (x,), backend="eager", config=config)
    wanted = compiled(x)
    got = compiled(x, out=tuple(torch.empty_like(value) for value in wanted))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert not [warning for warning in recwarn if "resized" in str(warning.message)]
    copies = next(iter(compiled.variants[0].filled.values())).call.code.count("aten.copy_.default(")
    assert copies == (0 if len(sizes) == 2 else 3)


OPS = (
    lambda a, b: a + b,
    lambda a, b: a * 2 - b,
    lambda a, b: a @ b,
    lambda a, b: a.sin(),
    lambda a, b: torch.cat([a[:2], b[2:]]),
    lambda a, b: a.t(),
    lambda a, b: torch.where(a > 0, a, b),
    lambda a, b: a.softmax(-1),
    lambda a, b: a[:, :1].expand(4, 4),
)


@settings(max_examples=examples(25))
@given(
    st.lists(st.tuples(st.integers(0, len(OPS) - 1), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5)
)
def test_any_result_is_the_same_in_out(steps):
    def program(x, y):
        values = [x, y]
        for op, left, right in steps:
            values.append(OPS[op](values[left % len(values)], values[right % len(values)]))
        return tuple(values[2:])

    x, y = torch.randn(4, 4), torch.randn(4, 4)
    compiled = graft.compile(program, (x, y))
    out = tuple(torch.full((4, 4), torch.nan) for _ in steps)
    got = compiled(x, y, out=out)
    for result, own, wanted in zip(got, out, compiled(x, y), strict=True):
        assert result is own and torch.equal(own, wanted)


def test_a_module_with_the_stance_captures_by_warm_alone():
    def branches(x):
        return x * 3 if x.shape[0] > 4 else x * 2

    sizes = ({0: Dim.DYNAMIC},)
    compiled = graft.compile(branches, (torch.ones(6),), dynamic_shapes=sizes, stance="error_on_new_variant")
    with pytest.raises(UsageError, match=r"frozen with 1 variants"):
        compiled(torch.ones(3))
    compiled.warm([(torch.ones(3),)])
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0)) and compiled.frozen
    with pytest.raises(UsageError, match="'default' or 'error_on_new_variant'"):
        graft.compile(branches, (torch.ones(6),), stance="other")
