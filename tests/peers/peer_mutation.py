"""Writes in place, as tests of Inductor's mutation and reinplacing cover them: which memory, in which order."""

from __future__ import annotations

import torch
from peer_programs import Table, ramp, whole
from torch import nn

MUTATION = Table("mutation")
add = MUTATION.add


def one():
    return (ramp(3, 4),)


def two():
    return ramp(3, 4), ramp(3, 4, start=2.0)


@add(one)
def add_then_read(x):
    x.add_(1)
    return x * 2


@add(one)
def read_then_add(x):
    before = x * 2
    x.add_(1)
    return before


@add(one)
def read_between_two_writes(x):
    x.add_(1)
    middle = x.sum(0)
    x.mul_(2)
    return middle, x.sum(1)


@add(two)
def copy_from_another_input(x, y):
    x.copy_(y)
    return x + y


@add(two)
def swap_two_inputs(x, y):
    old = x.clone()
    x.copy_(y)
    y.copy_(old)
    return x - y


@add(lambda: (ramp(3, 4), ramp(4)))
def broadcast_copy(x, row):
    x.copy_(row)
    return x.sum()


@add(lambda: (ramp(3, 4), ramp(3, 4, dtype=torch.int64)))
def casting_copy(x, y):
    x.copy_(y)
    return x / 2


@add(one)
def row_by_select(x):
    x[1].mul_(3)
    return x.sum(0)


@add(one)
def columns_by_slice(x):
    x[:, 1:3].add_(5)
    return x.clone()


@add(one)
def every_other_column(x):
    x[:, ::2] = 0
    return x + 1


@add(one)
def negative_index(x):
    x[-1, -2].fill_(9)
    return x.amax(0)


@add(one)
def through_a_transpose(x):
    x.t()[2].sub_(1)
    return x.t().contiguous()


@add(one)
def through_a_flat_view(x):
    x.view(-1)[3:7].neg_()
    return x


@add(one)
def through_a_permutation(x):
    x.view(3, 2, 2).permute(2, 0, 1)[0].zero_()
    return x.sum()


@add(one)
def through_a_diagonal(x):
    x.diagonal().fill_(0)
    return x @ x.t()


@add(one)
def through_unfold(x):
    x.unfold(1, 2, 2)[:, :, 0].add_(1)
    return x.cumsum(1)


@add(one)
def through_as_strided(x):
    x.as_strided((2, 2), (4, 1), 5).mul_(2)
    return x - 1


@add(one)
def parts_of_a_split(x):
    left, right = x.split([1, 3], dim=1)
    left.add_(10)
    right.copy_(right.flip(1).clone())
    return left.sum() + right.sum()


@add(one)
def parts_of_a_chunk_swapped(x):
    a, b = x.chunk(2, 1)
    old = a.clone()
    a.copy_(b)
    b.copy_(old)
    return x.clone()


@add(one)
def parts_of_an_unbind(x):
    rows = x.unbind(0)
    rows[0].add_(rows[1])
    rows[2].sub_(rows[0])
    return torch.stack(rows)


@add(lambda: (ramp(8),))
def shift_with_a_clone(x):
    x[1:] = x[:-1].clone()
    return x * 1.0


@add(lambda: (ramp(8),))
def rolling_window(x):
    x.copy_(torch.roll(x, -1))
    x[-1] = 0
    return x.sum()


@add(two)
def foreach_writes(x, y):
    torch._foreach_add_([x, y], 1.0)
    torch._foreach_mul_([x, y], [2.0, 3.0])
    return x + y


@add(two)
def lerp_and_addcmul(x, y):
    x.lerp_(y, 0.5)
    y.addcmul_(x, x, value=2)
    return x.sum() + y.sum()


@add(one)
def clamp_and_masked_fill(x):
    x.clamp_(2, 5)
    x.masked_fill_(x == 5, -1)
    return x.abs()


@add(two)
def out_argument(x, y):
    torch.add(x, 1, out=y)
    return y * 2


@add(two)
def out_argument_of_a_matmul(x, y):
    result = x.new_empty(3, 3)
    torch.mm(x, y.t(), out=result)
    return result + 1


@add(two)
def fresh_tensor_is_filled(x, y):
    made = torch.empty_like(x)
    made.copy_(x)
    made[1:] += y[1:]
    return made


@add(one)
def fresh_tensor_and_its_view_returned(x):
    made = x * 2
    view = made[1:]
    made.add_(1)
    return made, view


@add(one)
def clone_of_an_input_is_written(x):
    made = x.clone()
    made[0].zero_()
    return made


@add(one)
def clone_of_a_view_is_written(x):
    made = x[1:].clone()
    made.mul_(x[0])
    return made, x.sum()


@add(one)
def written_and_returned(x):
    x.add_(1)
    return x


@add(one)
def result_of_the_write_returned(x):
    return x.mul_(2), x.relu_()


@add(one)
def view_of_a_written_input_returned(x):
    row = x[1]
    x.add_(1)
    return row, x[:, 2:]


@add(two)
def one_write_feeds_another(x, y):
    x.add_(y)
    y.add_(x)
    x.add_(y)
    return x, y.clone()


@add(lambda: (ramp(4, dtype=torch.int64), ramp(4, dtype=torch.int64)))
def integer_arithmetic_in_place(x, y):
    x.bitwise_and_(y + 1)
    y.__ior__(x)
    x.floor_divide_(2)
    return x + y


@add(lambda: (ramp(4).bool(), ramp(4)))
def booleans_in_place(flags, x):
    flags.logical_xor_(x > 3)
    return x.where(flags, -x)


@add(lambda: (torch.tensor(3.0), torch.tensor(2)))
def numbers_0d_in_place(total, steps):
    total.add_(1)
    steps.add_(1)
    return total * steps


@add(lambda: (ramp(0, 4), ramp(2, 4)))
def empty_tensor_in_place(empty, x):
    empty.add_(1)
    x.add_(1)
    return torch.cat([empty, x])


@add(lambda: (ramp(3, 4, dtype=torch.bfloat16), ramp(3, 4)))
def mixed_precision_in_place(x, y):
    x.add_(y)
    x.mul_(0.5)
    return x.float() + y


@add(lambda: (ramp(4, 3).t(), ramp(6, 8)[::2, ::2]))
def inputs_that_are_not_contiguous(x, y):
    x.add_(1)
    y.copy_(x)
    return x * y


@add(lambda: (ramp(2, 6, 4).transpose(0, 1), whole(0, 5)))
def positions_in_a_transposed_input(x, places):
    x.index_fill_(0, places, 7)
    return x.sum((1, 2))


@add(two)
def loop_of_writes(x, y):
    for row in range(3):
        x[row] += y[row] * row
        y[row] = x[row]
    return x.sum() + y.sum()


@add(one)
def write_that_is_undone(x):
    x.add_(1)
    x.sub_(1)
    return x + 0


@add(one)
def write_of_nothing(x):
    x[3:].add_(1)
    return x.sum()


@add(lambda: (ramp(2, 3), ramp(3, 2)), alone=True)  # torch cannot resize what has an open size
def copy_resized_as_another(x, like):
    return x.neg().resize_as_(like) + 1


@add(one)
def dropout_and_relu_in_place(x):
    torch.nn.functional.dropout(x, 0.5, training=False, inplace=True)
    torch.nn.functional.relu(x - 3, inplace=True)
    return torch.nn.functional.leaky_relu(x.sub_(3), 0.5, inplace=True)


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("window", torch.zeros(3, 4))


@add(one)
class counter_and_running_sum(Buffers):
    def forward(self, x):
        self.steps += 1
        self.total += x.sum(0)
        return self.total / self.steps


@add(one)
class buffer_assigned_anew(Buffers):
    def forward(self, x):
        self.total = self.total * 0.5 + x.sum(0)
        return x + self.total


@add(one)
class window_that_rolls(Buffers):
    def forward(self, x):
        self.window.copy_(torch.cat([self.window[1:], x[:1]]))
        return self.window.sum(0)


@add(one)
class buffers_swapped(Buffers):
    def forward(self, x):
        self.window[self.steps % 3] = x[0]
        self.steps.add_(1)
        return self.window.clone()


@add(lambda: (ramp(4, 3, 2),), close=True)
class batch_norm_in_training(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=0.5)

    def eval(self):
        return self.train()

    def forward(self, x):
        return self.norm(x)
