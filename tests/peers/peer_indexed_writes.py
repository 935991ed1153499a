"""Writes at positions that a tensor names, as tests of Inductor's scatter and index_put cover them."""

from __future__ import annotations

import torch
from peer_programs import Table, ramp, whole

INDEXED_WRITES = Table("indexed_writes")
add = INDEXED_WRITES.add


def two():
    return ramp(3, 4), ramp(3, 4, start=2.0)


@add(lambda: (ramp(6, 2), whole(1, 4), ramp(2, 2, start=20.0)))
def index_put_rows(x, places, rows):
    x[places] = rows
    return x.sum(1)


@add(lambda: (ramp(6, 2), whole(1, 1, 4), ramp(3, 2)))
def index_put_accumulates(x, places, rows):
    x.index_put_((places,), rows, accumulate=True)
    return x.clone()


@add(lambda: (ramp(6, 2), whole(1, 4), ramp(2, 2)))
def index_put_functional_copied_back(x, places, rows):
    new = x.index_put((places,), rows)
    x.copy_(new)
    return new.sum()


@add(lambda: (ramp(6, 2), whole(1, 4), ramp(2, 2)))
def index_put_whose_old_value_is_read(x, places, rows):
    new = torch.index_put(x, (places,), rows)
    return new, x + 1


@add(lambda: (ramp(6, 2), whole(5, 0), ramp(2, 2)))
def index_copy_then_index_select(x, places, rows):
    x.index_copy_(0, places, rows)
    return x.index_select(0, places)


@add(lambda: (ramp(6, 2), whole(2, 2), ramp(2, 2)))
def index_add_with_repeats(x, places, rows):
    x.index_add_(0, places, rows, alpha=2)
    return x - 1


@add(lambda: (ramp(6, 2), torch.tensor(2), ramp(1, 2)))
def index_add_at_a_number(x, place, row):
    x.index_add_(0, place, row)
    return x.index_add(0, place, row)


@add(lambda: (ramp(6, 2), whole(0, 3), ramp(6, 2)))
def index_fill_and_reduce(x, places, rows):
    x.index_fill_(0, places, 3)
    x.index_reduce_(0, places, rows[:2], "prod")
    return x.sum()


@add(lambda: (ramp(3, 4), torch.tensor([[0, 1], [2, 3], [1, 0]]), ramp(3, 2, start=10.0)))
def scatter_values(x, index, source):
    x.scatter_(1, index, source)
    return x.gather(1, index)


@add(lambda: (ramp(3, 4), torch.tensor([[0, 0], [2, 2], [1, 0]]), ramp(3, 2)))
def scatter_add_and_reduce(x, index, source):
    x.scatter_add_(1, index, source)
    x.scatter_reduce_(1, index, source, "amax")
    return x.clone()


@add(two)
def masked_scatter(x, y):
    x.masked_scatter_(x > 3, y)
    return x.sum()


@add(lambda: (ramp(4, 4), torch.tensor(1), torch.tensor(2.0)))
def element_at_tensor_positions(x, place, value):
    x[place, 2] = value
    return x[place]


@add(lambda: (ramp(4, 4),))
def boolean_mask_assignment(x):
    x[x > 4] = 0
    return x.sum(0)


@add(two)
def slice_scatter_without_write_back(x, y):
    return torch.slice_scatter(x, y[:, :2], 1, 1, 3), x.sum()


@add(two)
def select_scatter_chain_copied_back(x, y):
    new = torch.select_scatter(x, y[0], 0, 1)
    new = torch.select_scatter(new, y[1], 0, 2)
    x.copy_(new)
    return x[1:].clone()
