"""Views handed to mutating custom ops start where they start in eager: static and dynamic sizes, every route."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.export import Dim

import graft
from graft.backends.inductor import has_symbols, post_grad_backend, reset_compiler
from graft.memory.inductor_fix.functionalization import inductor_options
from marks import examples, short
from postgrad import compile_passes

os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # the instruction sets of this machine are not tried out


@torch.library.custom_op("offsets::double_", mutates_args=("x",))
def double_(x: Tensor) -> None:
    x.mul_(2)


@torch.library.custom_op("offsets::index_copy_", mutates_args=("x",))
def index_copy_(x: Tensor, at: Tensor, rows: Tensor) -> None:
    x.index_copy_(0, at, rows)


@torch.library.custom_op("offsets::swap_", mutates_args=("parts",))
def swap_(parts: list[Tensor]) -> None:
    first, second = (part.clone() for part in parts)
    parts[0].copy_(second)
    parts[1].copy_(first * 2)


@torch.library.custom_op("offsets::places_", mutates_args=("x",))
def places_(x: Tensor) -> Tensor:
    found = x.nonzero().contiguous()
    x.add_(1)
    return found


@torch.library.custom_op("offsets::two_places_", mutates_args=("x",))
def two_places_(x: Tensor) -> tuple[Tensor, Tensor]:
    found = x.nonzero().contiguous()
    x.add_(1)
    return found, found[:1, 0].clone()


def size() -> torch.SymInt:
    return torch.library.get_ctx().new_dynamic_size()


places_.register_fake(lambda x: x.new_empty((size(), x.dim()), dtype=torch.int64))
two_places_.register_fake(lambda x: tuple(x.new_empty(s, dtype=torch.int64) for s in ((size(), x.dim()), (size(),))))
ops = torch.ops.offsets

# of an input [n, n, 4]; those of the first line went wrong on graft.compile(…, backend="inductor")
VIEWS = [
    *("x[1]", "x[2]", "x[-1]", "x[1, 0]", "x[1].view(-1)", "x[1].t()", "x[1, 2:4]", "x[1:].view(-1)"),
    *("x", "x[1:]", "x[:, 1:]", "x[:, 1]", "x.split(1)[1]", "x.unbind(0)[1]", "x[1:, 1:, 1:]", "x[::2]"),
    *("x[x.size(0) - 1]", "x.view(-1)[3:]", "x.transpose(0, 1)[1]", "x.permute(2, 0, 1)[1:]", "x[..., -1]"),
    *("x[:, :, ::2][1]", "x.unsqueeze(0)[0, 1]", "x.diagonal(0, 0, 1)[1:]", "x[1:][1].t()[1:]"),
]


def program(views: list[str], values: str = "x"):
    scope = {"torch": torch}
    lines = [f"def f(x):\n    x = {values}", *(f"    torch.ops.offsets.double_({view})" for view in views)]
    exec("\n".join([*lines, "    return x"]), scope)
    return scope["f"]


def given_input(n: int, begin: int) -> tuple[Tensor, Tensor]:
    """A storage, and an input [n, n, 4] in it that starts at `begin`."""
    storage = torch.arange(float(n * n * 4 + 20))
    return storage, storage[begin : begin + n * n * 4].view(n, n, 4)


def check(run, function, n: int, begin: int) -> None:
    (want, x), (got, y) = given_input(n, begin), given_input(n, begin)
    expected, result = function(x), run(y)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    if expected is not None:
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


@settings(max_examples=examples(12), deadline=None)
@given(
    st.lists(st.sampled_from(VIEWS), min_size=1, max_size=2),
    st.sampled_from(["x", "x", "x + 1", "x[1:].clone()", "(x + 1)[1:].clone()"]),
    st.sampled_from([0, 4, 7]),
    st.booleans(),
)
def test_offsets_of_views_in_the_last_graph(views, values, begin, dynamic):
    """Without code generation: what the graph says of every view is what it is in eager."""
    function = program([view for view in views if "[2]" not in view], values)
    compiled = compile_passes(function, (given_input(4, begin)[1],), ("fixed",), dynamic=dynamic)
    graph = compiled.graphs["fixed"].graph
    assert not graph.find_nodes(op="call_function", target=torch.ops.aten.sym_storage_offset.default)
    check(lambda x: compiled("fixed", x), function, 4, begin)


def compiled_with_inductor(function, *, dynamic: bool):
    reset_compiler()
    return torch.compile(function, dynamic=dynamic, options=inductor_options())


@pytest.mark.exhaustive  # the short run: in the last graph, and through torch.compile
@settings(max_examples=examples(2), deadline=None)
@given(st.lists(st.sampled_from(VIEWS), min_size=3, max_size=3, unique=True), st.sampled_from([0, 4, 7]))
def test_offsets_of_views_in_generated_code(views, begin):
    """Ops that write in place need no kernel of Inductor's, so none is compiled; other sizes run on the same code."""
    function = program(views)
    run = compiled_with_inductor(function, dynamic=True)
    with torch.no_grad():
        check(run, function, 4, begin)
        check(run, function, 5, begin)


@pytest.mark.parametrize("begin", short([0, 4, 7], 4))
def test_an_input_that_is_a_view_has_its_slices_where_they_are(begin):
    """torch counts them from the start of the storage, in static programs too."""
    function = program(VIEWS[:15])
    check(compiled_with_inductor(function, dynamic=False), function, 4, begin)


class Cache(nn.Module):
    def forward(self, kv, at, rows):
        ops.index_copy_(kv[1], at, rows)
        kv[0].index_copy_(0, at, rows)  # graft knows this one, and would leave the length of the cache dynamic


@pytest.mark.exhaustive
@pytest.mark.parametrize("asked", short([False, True], False))
def test_a_stacked_cache_is_written_in_its_own_layer(asked):
    rows, at = torch.ones(1, 4), torch.tensor([2])
    shapes = {"kv": {1: Dim.DYNAMIC}, "at": None, "rows": None} if asked else None
    example = (torch.zeros(2, 6, 4), at, rows)
    compiled = graft.compile(Cache(), example, dynamic_shapes=shapes, backend="inductor")
    noted = any("is a custom op that writes through a view" in note for note in compiled.report.notes)
    assert (noted or asked) and has_symbols(compiled.graph_module.graph) is asked
    for length in (6, 9) if asked else (6,):
        kv, want = torch.zeros(2, length, 4), torch.zeros(2, length, 4)
        Cache()(want, at, rows)
        compiled(kv, at, rows)
        assert torch.equal(kv, want)


def test_torch_compile_with_the_graft_backend_and_dynamic_sizes():
    def last_from_first(x):
        ops.index_copy_(x[x.size(0) - 1], torch.arange(x.size(1), device=x.device), x[0])

    reset_compiler()
    run = torch.compile(last_from_first, backend="graft", dynamic=True)
    for n in (4, 5):
        check(run, last_from_first, n, 0)


def test_a_list_of_views_is_left_to_inductor_and_right():
    function = program([])

    def swaps(x):
        ops.swap_([x[1], x[2]])
        return function(x)

    run = compiled_with_inductor(swaps, dynamic=True)
    check(run, swaps, 4, 4)
    check(run, swaps, 5, 4)


PLACES = {
    "one result": lambda x: ops.places_(x),
    "two results": lambda x: ops.two_places_(x),
    "of a view": lambda x: ops.places_(x[1]).sum(0),
    "twice": lambda x: (ops.places_(x), ops.places_(x)),
    "used as a position": lambda x: x.view(-1)[ops.two_places_(x)[1]],
    "written": lambda x: ops.double_(ops.places_(x)),
}


@pytest.mark.parametrize("name", PLACES)
def test_results_of_sizes_known_at_run_time(name):
    """The FX passes, where torch compared the new names of such sizes with the old ones."""
    reset_compiler()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = torch.compile(
            PLACES[name], backend=post_grad_backend(inductor_options(), lambda *_: None), fullgraph=True
        )
        check(run, PLACES[name], 4, 0)


@pytest.mark.parametrize("route", short(["graft.compile", "torch.compile"], "torch.compile"))
def test_results_of_sizes_known_at_run_time_in_generated_code(route):
    class Module(nn.Module):
        def forward(self, x):
            return ops.two_places_(x)[0].sum(0)

    reset_compiler()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        if route == "torch.compile":
            run = torch.compile(Module(), backend="graft")
        else:
            run = graft.compile(Module(), (given_input(4, 0)[1],), backend="inductor")
        check(run, Module(), 4, 0)
