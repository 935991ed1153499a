"""The tensor objects of a call: results that are views, and inputs whose shape or memory changes in place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import graft
from graft.backends.inductor import reset_compiler
from graft.base.errors import CaptureError
from marks import examples, short


class Module(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.register_buffer("state", torch.arange(6.0).view(2, 3))

    def forward(self, a, b):
        return self.function(self, a, b)


def inputs() -> list[torch.Tensor]:
    return [torch.arange(6.0).view(2, 3), torch.ones(2, 3)]


def objects(results, given) -> list[tuple[bool, ...]]:
    """Which results are one object with an input, and with one another."""
    return [tuple(result is other for other in (*given, *results)) for result in results]


# what gives the caller's tensor itself, and what a new object over its memory
VIEWS = [
    *("{}", "{}.view(2, 3)", "{}[:]", "{}.reshape(2, 3)", "{}.t().t()", "{}.detach()", "{}.expand(2, 3)"),
    *(
        "{}.contiguous()",
        "{}.to(torch.float32)",
        "{}.flatten()",
        "{}.view(-1).flatten()",
        "{}.unsqueeze(0).squeeze(0)",
    ),
    *(
        "{}.mul_(2)",
        "{}.mul_(2).view(2, 3)",
        "{}.transpose(0, 0)",
        "{}.view_as(b)",
        "{}.type_as(b)",
        "{}[1:]",
        "{} + 1",
    ),
]


@settings(max_examples=examples(12), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(VIEWS), st.sampled_from(["a", "self.state"])), min_size=1, max_size=4))
def test_results_are_the_objects_that_eager_returns(parts):
    returned = ", ".join(view.format(name) for view, name in parts)
    scope = {"torch": torch}
    exec(f"def f(self, a, b): return [{returned}]", scope)
    module, twin = Module(scope["f"]), Module(scope["f"])
    compiled = graft.compile(module, tuple(inputs()), backend="eager")
    given, got_given = inputs(), inputs()
    want, got = twin(*given), compiled(*got_given)
    torch.testing.assert_close([*got, *got_given, module.state], [*want, *given, twin.state], rtol=0, atol=0)
    assert objects(got, [*got_given, module.state]) == objects(want, [*given, twin.state])


@pytest.mark.parametrize("route", short(["eager", "inductor", "torch.compile"], "eager", "torch.compile"))
def test_a_view_of_an_input_is_not_the_input_on_any_route(route):
    def f(self, a, b):
        return a.view(2, 3), a, b[:], b.mul_(2)

    reset_compiler()
    if route == "torch.compile":
        run = torch.compile(Module(f), backend="graft")
    else:
        run = graft.compile(Module(f), tuple(inputs()), backend=route)
    given = inputs()
    with torch.no_grad():
        results = run(*given)
    assert objects(results, given) == objects(f(None, *(want := inputs())), want)
    assert results[0].data_ptr() == given[0].data_ptr()


METADATA = [
    *("{}.t_()", "{}.transpose_(0, 1)", "{}.unsqueeze_(0)", "{}.resize_(3)", "{}.set_(b[1:])", "{}.data = b[1:]"),
    *("{}.data = b", "{}.set_(b)", "{}.as_strided_((3,), (1,))", "{}.swapaxes_(0, 1)", "{}.resize_(3, 2)"),
]
AFTER = ["return {} + 1", "{}.mul_(2); return {} + 1", "return b + 1", "return {}"]


def statement(*lines: str):
    scope = {"torch": torch}
    body = "; ".join(lines).replace("; ", "\n    ")
    exec(f"def f(self, a, b):\n    {body}", scope)
    return scope["f"]


@settings(max_examples=examples(15), deadline=None)
@given(
    st.sampled_from(METADATA),
    st.sampled_from(AFTER),
    st.sampled_from(["a", "self.state"]),
    st.sampled_from(["eager", "inductor"]),
)
def test_changed_shapes_strides_and_memory_are_refused_with_the_name(change, after, name, backend):
    function = statement(change.format(name), after.replace("{}", name))
    what = "the argument a" if name == "a" else "self.state"
    with pytest.raises(CaptureError, match=f"the memory of {what} in place"):
        graft.compile(Module(function), tuple(inputs()), backend=backend)


@settings(max_examples=examples(8), deadline=None)
@given(
    st.sampled_from(["x = a.view_as(a); x.t_(); x.mul_(2); return x", "a.t_(); a.mul_(2); a.t_(); return a + 1"]),
    st.sampled_from(["eager"]),
)
def test_changes_of_a_views_shape_and_changes_that_are_undone_are_right(text, backend):
    function = statement(text)
    compiled = graft.compile(Module(function), tuple(inputs()), backend=backend)
    given, want = inputs(), inputs()
    assert torch.equal(compiled(*given), function(None, *want)) and torch.equal(given[0], want[0])


def test_torch_compile_refuses_memory_that_it_cannot_hand_back():
    def f(a, b):
        a.data = b[1:]
        return a + 1

    reset_compiler()
    with pytest.raises(Exception, match="gives an input other memory"), torch.no_grad():
        torch.compile(f, backend=graft.Backend())(*inputs())


def test_a_transposed_input_is_right_through_torch_compile():
    def f(a, b):
        a.t_()
        a.mul_(2)
        return a + b.t()

    reset_compiler()
    given, want = inputs(), inputs()
    with torch.no_grad():
        got = torch.compile(f, backend=graft.Backend())(*given)
    assert torch.equal(got, f(*want)) and torch.equal(given[0], want[0]) and given[0].stride() == want[0].stride()


def test_a_size_is_a_size(tmp_path):
    compiled = graft.compile(lambda x: (x.shape, {"n": x[0].size()}), (torch.ones(3, 2),))
    compiled.save(tmp_path / "saved")
    for module in (compiled, graft.load(tmp_path / "saved")):
        shape, rest = module(torch.ones(3, 2))
        assert type(shape) is torch.Size and shape == (3, 2)
        assert type(rest["n"]) is torch.Size and rest["n"] == (2,)


@pytest.mark.parametrize("backend", ["eager", "cuda_graph"])
def test_copies_that_eager_makes_apart_stay_apart(backend):
    """`reshape` copies here, twice: one result in the memory of the other would change with it."""

    def program(x):
        return x.reshape(-1), x.reshape(-1), x.flatten()[1:]

    compiled = graft.compile(program, (torch.ones(4, 3).t(),), backend=backend)
    for x in (torch.ones(4, 3).t(), torch.ones(3, 4)):  # of the second all are views
        got, wanted = compiled(x), program(x)
        for results in (got, wanted):
            results[0].add_(1)
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
