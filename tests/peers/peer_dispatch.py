"""Signatures, aliases and effects, as tests of AOT dispatch cover them: what is an input, a view, an output."""

from __future__ import annotations

from typing import NamedTuple

import torch
from peer_programs import Table, ramp
from torch import nn

DISPATCH = Table("dispatch")
add = DISPATCH.add


def one():
    return (ramp(3, 4),)


def two():
    return ramp(3, 4), ramp(3, 4, start=2.0)


@add(one)
def input_returned(x):
    return x


@add(two)
def input_returned_twice_and_a_sum(x, y):
    return x, x + y, x


@add(one)
def view_of_an_input(x):
    return x.t()


@add(one)
def view_of_the_same_shape(x):
    return x.view(3, 4)


@add(one)
def chain_of_views_back_to_itself(x):
    return x.t().t()


@add(one)
def views_of_one_input(x):
    return x[0], x[1:], x.view(2, 6)


@add(one)
def detached_input(x):
    return x.detach()


@add(one)
def expanded_input(x):
    return x.unsqueeze(0).expand(2, 3, 4)


@add(one)
def reshape_that_copies(x):
    return x.t().reshape(-1)


@add(one)
def reshape_that_views(x):
    return x.reshape(-1)


@add(one)
def contiguous_of_contiguous(x):
    return x.contiguous(), x.t().contiguous()


@add(one)
def cast_to_the_same_dtype(x):
    return x.to(torch.float32), x.float(), x.double()


@add(one)
def intermediate_and_its_views(x):
    y = x + 1
    return y, y[0], y.t()


@add(one)
def two_views_of_an_intermediate(x):
    y = (x * 2).view(-1)
    return y[:6], y[6:]


@add(one)
def intermediate_returned_twice(x):
    y = x * 3
    return y, y


@add(one)
def equal_intermediates_are_apart(x):
    return x * 3, x * 3


@add(one)
def clone_beside_its_source(x):
    y = x + 1
    return y, y.clone()


@add(one)
def view_then_write_of_the_base(x):
    y = x.clone()
    row = y[0]
    y.add_(1)
    return row


@add(one)
def write_through_a_view_of_an_intermediate(x):
    y = x + 1
    y[1].mul_(2)
    y.t()[0].zero_()
    return y


@add(one)
def input_written_and_its_view_returned(x):
    x.mul_(2)
    return x.view(-1)


@add(one)
def input_written_and_views_made_before(x):
    flat = x.view(-1)
    x.mul_(2)
    return flat[2:], flat


@add(two)
def written_input_and_plain_alias_of_other(x, y):
    x.copy_(y)
    return y, y[0], x[0]


@add(lambda: (ramp(3, 4), 2, 0.5, True, None, "mean"))
def numbers_flags_none_and_text(x, n, f, flag, nothing, how):
    y = x * n + f
    y = y if flag and nothing is None else -y
    return (y.mean() if how == "mean" else y.sum()), n + 1, f, flag, nothing, how


@add(one)
def results_that_are_no_tensors(x):
    return {"shape": tuple(x.shape), "rank": x.dim(), "nothing": None, "y": x + 1, "list": [1, "a", x.sum()]}


@add(one)
def no_result(x):
    x.add_(1)


@add(one)
def empty_tuple(x):
    x.add_(1)
    return ()


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@add(one)
def named_tuple(x):
    return Pair(x + 1, x - 1)


@add(one)
def torchs_own_named_tuple(x):
    return x.max(1), x.sort(1, descending=True)


@add(lambda: ({"k": ramp(2, 3), "v": [ramp(3), ramp(3, start=2.0)]}, (ramp(2, 3),)))
def nested_inputs(tree, rest):
    tree["k"].add_(rest[0])
    tree["v"][1].mul_(2)
    return {"sum": tree["k"] + tree["v"][0], "same": tree["v"]}


@add(lambda: (ramp(3), ramp(3), ramp(3)))
def inputs_that_are_not_used(x, unused, z):
    return x + z


@add(lambda: (lambda x: (x, x))(ramp(3)))
def one_tensor_given_twice_and_read(x, y):
    return x * y, x + 1


@add(lambda: (lambda x: (x[:3], x[1:]))(ramp(4, 3)))
def overlapping_inputs_read(x, y):
    return x * y


@add(lambda: (lambda x: (x[0], x[1]))(ramp(2, 3)))
def disjoint_views_of_one_base_written(x, y):
    x.add_(y)
    y.mul_(2)
    return x - y


@add(one)
def intermediate_transposed_in_place(x):
    y = x * 2
    y.t_()
    y.unsqueeze_(0)
    return y


@add(one)
def shape_arithmetic(x):
    rows, columns = x.shape
    return x.new_full((rows + columns,), rows * columns), x.numel() // rows


@add(one)
def branch_on_a_shape(x):
    return x * 2 if x.shape[0] > 2 else x * 3


@add(lambda: (ramp(3, 4), torch.tensor(2)))
def cond_by_data(x, n):
    return torch.where(n > 1, x * 2, x - 1)


@add(one, alone=True)  # stock Inductor gives copies
def random_free_dropout(x):
    return torch.nn.functional.dropout(x, 0.5, training=False), torch.nn.functional.dropout(x, 0.0)


@add(one)
def constants_of_the_program(x):
    table = torch.tensor([1.0, 2.0, 3.0, 4.0])
    return x * table, table.sum()


@add(one)
def constant_returned(x):
    return torch.ones(2), torch.arange(3), x.new_zeros(2)


@add(one)
def no_grad_and_autocast_off(x):
    with torch.no_grad():
        y = x * 2
    with torch.enable_grad():
        return y + x


@add(lambda: (ramp(2, 3, dtype=torch.float64), ramp(2, 3, dtype=torch.int32)))
def dtypes_promoted(x, n):
    return x + n, n / 2, n * 2.0, n.bool() & (x > 1)


@add(lambda: (torch.view_as_complex(ramp(2, 3, 2)),))
def complex_numbers(z):
    z.mul_(2j)
    return z.abs(), torch.view_as_real(z), z.conj().resolve_conj()


@add(lambda: (ramp(0, 3), ramp(2, 3)))
def empty_inputs(empty, x):
    return torch.cat([empty, x]), empty.sum(0), empty.t()


@add(lambda: (torch.tensor(2.0), torch.tensor(3)))
def inputs_0d(x, n):
    return x * n, x.expand(3), n.view(1)


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor(2.0))
        self.tied = self.linear.weight


@add(one, close=True)
class parameters_and_a_tied_weight(Linear):
    def forward(self, x):
        return self.linear(x) @ self.tied * self.scale


@add(one)
class parameter_and_buffer_returned(Linear):
    def forward(self, x):
        return self.linear.weight, self.scale, self.linear.weight.t(), x + self.scale


@add(one)
class parameter_views_and_an_input(Linear):
    def forward(self, x):
        return x.sum() + self.linear.bias[:2], self.linear.bias[2:]


@add(one)
class keywords_with_defaults(nn.Module):
    def forward(self, x, scale=2.0, *, shift=1):
        return x * scale + shift


@add(one)
class hooks_are_part_of_the_call(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()
        self.inner.register_forward_hook(lambda module, args, result: result + 1)
        self.inner.register_forward_pre_hook(lambda module, args: (args[0] * 2,))

    def forward(self, x):
        return self.inner(x)
