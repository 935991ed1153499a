"""What decides in a numeric check: bounds, sizes and layouts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from graft.passes.numeric.compare import CEILING, difference
from graft.passes.numeric.execution import Execution
from graft.passes.numeric.layouts import LAYOUTS, copy_in_layout, lay_out
from graft.passes.numeric.sizes import further_sizes, needed_sizes

pytestmark = pytest.mark.usefixtures("every_size")


def test_a_bound_above_a_tenth_is_never_accepted_in_silence():
    execution = Execution()
    execution.coarsest, execution.longest = torch.float32, 8
    exact = torch.ones(4, 8, dtype=torch.float64)
    before = torch.full((4, 8), 1.5)
    assert difference(exact, before, before.clone(), execution).limit == CEILING  # the same bits
    assert "itself is off by 50%" in difference(exact, before, torch.full((4, 8), 2.0), execution).unclear
    assert difference(exact, before, torch.full((4, 8), 9.0), execution).wrong
    assert not difference(exact, before, torch.full((4, 8), 1.01), execution).unclear


def test_an_infinity_is_right_where_the_exact_number_is_beyond_the_dtype_and_nowhere_else():
    """A norm in float16 whose squares overflow gives 0; one in float32 inside gives what rounds to infinity."""
    execution = Execution()
    execution.coarsest, execution.longest = torch.float16, 8
    exact, before = torch.tensor([1e6, -1e6, 3.0], dtype=torch.float64), torch.zeros(3, dtype=torch.float16)
    right = torch.tensor([torch.inf, -torch.inf, 3.0], dtype=torch.float16)
    assert not difference(exact, before, right, execution).wrong
    assert difference(exact, before, -right, execution).wrong
    for lost in (0, 1):  # what float16 holds is not infinite
        assert difference(exact[2:], exact[2:].half(), right[lost : lost + 1], execution).wrong
    assert difference(exact * 1e-2, (exact * 1e-2).half(), right, execution).wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-40], ids=["ordinary", "subnormal"])
def test_a_merge_is_held_to_a_share_of_its_values_whatever_their_size(scale, dtype):
    """Subnormal inputs once had a bound of 2.4 times the values: anything passed."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(5, 64, generator=generator) * scale).to(dtype)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    execution = Execution()
    execution.coarsest, execution.longest = dtype, 64
    exact, before = F.linear(x.double(), weight.double()), F.linear(x, weight)
    merged = torch.cat([F.linear(x, part) for part in weight.split((64, 16, 16))], -1)
    found = difference(exact, before, merged, execution)
    assert not found.wrong and not found.unclear and found.limit <= CEILING
    flushed = not merged.any()  # as some machines do with subnormal bfloat16: then zeros are the original's bits
    wrong_ones = [
        (exact * 1.25).to(dtype),
        exact.roll(1, -1).to(dtype),
        *([] if flushed else [torch.zeros_like(merged)]),
    ]
    for wrong in wrong_ones:
        judged = difference(exact, before, wrong, execution)
        assert judged.wrong or judged.unclear  # a step among subnormal bfloat16 is a quarter of these values: told


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 600))
def test_sizes_stay_within_what_the_graph_allows(one, other, most):
    upper = {"s0": min(one, most), "s1": min(other, most)}
    tried = [*needed_sizes(upper), *further_sizes(upper)]
    assert all(1 <= sizes[name] <= upper[name] for sizes in tried for name in upper)
    assert {"s0": 1, "s1": 1} in tried
    counts = {sizes["s1"] for sizes in tried if sizes["s0"] == 1}
    assert set(range(1, min(130, upper["s1"]) + 1)) <= counts
    assert any(sizes["s0"] * sizes["s1"] > 521 for sizes in tried) == (upper["s0"] >= 3 and upper["s1"] >= 175)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.sampled_from(LAYOUTS))
def test_layouts_keep_values_and_copies_keep_layouts(shape, layout):
    value = torch.arange(float(torch.Size(shape).numel())).view(shape)
    laid = lay_out(value, layout)
    assert torch.equal(laid, value) or (layout == "expanded" and torch.equal(laid, value[:1].expand(shape)))
    copy = copy_in_layout(laid)
    assert copy.stride() == laid.stride() and copy.storage_offset() == laid.storage_offset()
    assert torch.equal(copy, laid) and copy.data_ptr() != laid.data_ptr()
