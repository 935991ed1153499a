"""Custom ops that write into their arguments, as tests of auto_functionalize (v1, v2) cover them."""

from __future__ import annotations

import torch
from peer_programs import Table, ramp, whole
from torch import Tensor, nn

CUSTOM_OPS = Table("custom_ops")
add = CUSTOM_OPS.add


@torch.library.custom_op("peers::fill_", mutates_args=("x",))
def fill_(x: Tensor, value: float) -> None:
    x.fill_(value)


@torch.library.custom_op("peers::axpy_", mutates_args=("x",))
def axpy_(x: Tensor, y: Tensor, *, scale: float = 1.0) -> None:
    x.add_(y, alpha=scale)


@torch.library.custom_op("peers::pair_", mutates_args=("x", "y"))
def pair_(x: Tensor, y: Tensor) -> None:
    x.add_(1)
    y.mul_(2)


@torch.library.custom_op("peers::pop_", mutates_args=("x",))
def pop_(x: Tensor) -> Tensor:
    """Gives the sum of what it clears."""
    total = x.sum()
    x.zero_()
    return total


@torch.library.custom_op("peers::two_", mutates_args=("x",))
def two_(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x.add_(y)
    return x * 2, y.clone()


@torch.library.custom_op("peers::maybe_", mutates_args=("x", "y"))
def maybe_(x: Tensor, y: Tensor | None = None) -> None:
    x.add_(1)
    if y is not None:
        y.add_(x)


@torch.library.custom_op("peers::all_", mutates_args=("xs",))
def all_(xs: list[Tensor], value: float) -> None:
    for x in xs:
        x.add_(value)


@torch.library.custom_op("peers::put_", mutates_args=("cache",))
def put_(cache: Tensor, places: Tensor, rows: Tensor) -> None:
    cache.index_copy_(0, places, rows)


for op, fake in (
    (fill_, lambda x, value: None),
    (axpy_, lambda x, y, *, scale=1.0: None),
    (pair_, lambda x, y: None),
    (pop_, lambda x: x.new_empty(())),
    (two_, lambda x, y: (torch.empty_like(x), torch.empty_like(y))),
    (maybe_, lambda x, y=None: None),
    (all_, lambda xs, value: None),
    (put_, lambda cache, places, rows: None),
):
    op.register_fake(fake)
ops = torch.ops.peers


def one():
    return (ramp(3, 4),)


def two():
    return ramp(3, 4), ramp(3, 4, start=2.0)


def cache():
    return ramp(2, 5, 3), whole(1, 4), ramp(2, 3, start=10.0)


@add(one)
def write_an_input(x):
    ops.fill_(x, 3.0)
    return x + 1


@add(one)
def write_an_input_and_return_nothing(x):
    ops.fill_(x, 3.0)


@add(one)
def write_a_clone(x):
    y = x.clone()
    ops.fill_(y, 3.0)
    return y, x.sum()


@add(one)
def write_an_intermediate(x):
    y = x * 2
    ops.axpy_(y, x)
    return y


@add(one)
def read_before_and_after(x):
    before = x.sum(0)
    ops.axpy_(x, x.clone(), scale=2.0)
    return before, x.sum(0)


@add(one)
def read_lies_in_the_written_memory(x):
    ops.axpy_(x[0], x[1])
    return x.clone()


@add(two)
def write_two_inputs(x, y):
    ops.pair_(x, y)
    return x + y


@add(one)
def write_two_views_of_one_base(x):
    ops.pair_(x[0], x[1])
    return x.sum(0)


@add(one)
def write_two_columns_of_one_base(x):
    ops.pair_(x[:, 0], x[:, 2])
    return x.sum(1)


@add(one)
def write_the_parts_of_a_split(x):
    left, right = x.split(2, 1)
    ops.pair_(left, right)
    return left + right


@add(one)
def write_the_parts_of_an_unbind(x):
    a, b, c = x.unbind(0)
    ops.pair_(a, c)
    ops.fill_(b, 0.0)
    return x.clone()


@add(one)
def write_a_view_of_an_intermediate(x):
    y = x + 1
    ops.fill_(y[1:, :2], 0.0)
    return y


@add(one)
def write_a_transposed_view(x):
    ops.fill_(x.t()[1:3], 5.0)
    return x.sum(0)


@add(one)
def write_a_reshaped_view(x):
    ops.axpy_(x.view(2, 6), torch.ones(2, 6))
    return x.view(-1)[:3].clone()


@add(one)
def write_one_row(x):
    ops.fill_(x[1], 0.0)
    return x.sum(1)


@add(one)
def write_the_last_row(x):
    ops.fill_(x[-1], 0.0)
    return x.sum(1)


@add(one)
def result_and_write(x):
    total = ops.pop_(x)
    return total, x + total


@add(one)
def result_of_a_view(x):
    return ops.pop_(x[1:]) + ops.pop_(x[:1])


@add(two)
def several_results(x, y):
    a, b = ops.two_(x, y)
    return a + b, x


@add(two)
def optional_given(x, y):
    ops.maybe_(x, y)
    return x * y


@add(one)
def optional_left_out(x):
    ops.maybe_(x)
    ops.maybe_(x, None)
    return x.clone()


@add(one)
def keyword_with_default(x):
    ops.axpy_(x, torch.ones_like(x))
    ops.axpy_(x, torch.ones_like(x), scale=3.0)
    return x


@add(two)
def list_of_inputs(x, y):
    ops.all_([x, y], 1.0)
    return x + y


@add(one)
def list_of_views(x):
    ops.all_([x[0], x[2]], 2.0)
    return x.sum(0)


@add(one)
def list_of_an_intermediate(x):
    parts = [x * 2, x * 3]
    ops.all_(parts, 1.0)
    return parts[0] + parts[1]


@add(one)
def empty_list(x):
    ops.all_([], 1.0)
    return x + 1


@add(one)
def two_calls_on_one_input(x):
    ops.axpy_(x, torch.ones_like(x))
    middle = x * 1
    ops.fill_(x[0], 0.0)
    return middle, x.clone()


@add(two)
def writes_by_ops_and_by_aten(x, y):
    x.add_(1)
    ops.axpy_(x, y)
    y.mul_(2)
    ops.axpy_(y, x)
    return x - y


@add(one)
def write_in_a_loop(x):
    for row in range(3):
        ops.axpy_(x[row], x[(row + 1) % 3].clone())
    return x.sum()


@add(one)
def written_and_returned(x):
    ops.fill_(x, 1.0)
    return x


@add(one)
def view_of_the_written_returned(x):
    row = x[2]
    ops.fill_(x, 1.0)
    return row


@add(one)
def written_intermediate_returned_twice(x):
    y = x.clone()
    ops.fill_(y, 1.0)
    return y, y[0]


@add(two)
def argument_is_read_later(x, y):
    ops.axpy_(x, y)
    return y.sum(), x


@add(lambda: (ramp(3, 4, dtype=torch.bfloat16), ramp(3, 4, dtype=torch.int64)))
def other_dtypes(x, n):
    ops.fill_(x, 2.0)
    ops.pair_(n, x)
    return x + n


@add(lambda: (ramp(4, 3).t(),))
def input_that_is_not_contiguous(x):
    ops.axpy_(x, torch.ones(3, 4))
    return x * 2


@add(lambda: (torch.tensor(2.0), ramp(0, 3)))
def numbers_0d_and_empty_tensors(x, empty):
    ops.pair_(x, empty)
    return x + 1, empty.sum()


@add(lambda: (ramp(6, 3), whole(1, 4), ramp(2, 3)))
def rows_at_positions(x, places, rows):
    ops.put_(x, places, rows)
    return x.sum(1)


@add(cache)
def rows_in_the_second_layer(kv, places, rows):
    ops.put_(kv[1], places, rows)
    return kv.sum((1, 2))


@add(cache)
def rows_in_the_first_layer(kv, places, rows):
    ops.put_(kv[0], places, rows)
    return kv.sum((1, 2))


@add(cache)
def rows_in_both_layers_by_unbind(kv, places, rows):
    k, v = kv.unbind(0)
    ops.put_(k, places, rows)
    ops.put_(v, places, rows + 1)
    return (k * v).sum()


@add(cache)
def rows_in_a_negative_layer(kv, places, rows):
    ops.put_(kv[-1], places, rows)
    return kv[1].clone()


@add(cache)
def part_of_a_layer(kv, places, rows):
    ops.fill_(kv[1, 2:4], 0.0)
    ops.put_(kv[0], places, rows)
    return kv.clone()


@add(cache)
def flat_view_of_a_layer(kv, places, rows):
    ops.fill_(kv[1].view(-1), 1.0)
    ops.put_(kv[0], places, rows)
    return kv.sum(0)


@add(cache)
def slice_of_layers(kv, places, rows):
    ops.fill_(kv[1:], 1.0)
    ops.put_(kv[0], places, rows)
    return kv.sum(0)


@add(lambda: (ramp(5, 3),), dynamic={"x": {0: torch.export.Dim.DYNAMIC}})
def last_row_at_a_dynamic_size(x):
    ops.fill_(x[x.shape[0] - 1], 0.0)
    return x.sum(0)


@add(lambda: (ramp(5, 3),), dynamic={"x": {0: torch.export.Dim.DYNAMIC}})
def slice_at_a_dynamic_size(x):
    ops.fill_(x[1 : x.shape[0] - 1], 0.0)
    return x.sum(0)


@add(lambda: (ramp(2, 3, start=4.0),))
class op_on_buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 3))
        self.register_buffer("place", torch.tensor([0, 2]))

    def forward(self, x):
        ops.put_(self.cache, self.place, x)
        ops.axpy_(self.cache[1], x[0])
        self.place.add_(1).remainder_(4)
        return self.cache.sum(0)
