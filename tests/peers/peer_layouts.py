"""Writes that change an input's layout or reach memory that another input shares: each refused with its reason."""

from __future__ import annotations

from peer_programs import Table, ramp

LAYOUTS = Table("layouts")
add = LAYOUTS.add
MODULE = ("eager", "passes", "inductor")  # where graft.compile captures the whole forward
LAYOUT = dict.fromkeys(MODULE, "in place .*, which a compiled module cannot do")
SHARED = dict.fromkeys(MODULE, "shares memory")


def one():
    return (ramp(3, 4),)


def two():
    return ramp(3, 4), ramp(3, 4, start=2.0)


@add(
    lambda: (lambda x: (x, x))(ramp(3)),
    refused=SHARED,
)
def one_tensor_given_twice_and_written(x, y):
    x.add_(1)
    return y * 2


@add(
    lambda: (lambda x: (x[:3], x[1:]))(ramp(4, 3)),
    refused=SHARED,
)
def overlapping_inputs_written(x, y):
    x.add_(1)
    return y * 2


@add(
    lambda: (ramp(1, 3).expand(4, 3),),
    refused={"": "expanded"},
    routes=MODULE,  # torch's own error on the others
)
def expanded_input_written(x):
    x.add_(1)
    return x.sum()


@add(lambda: (ramp(4, 4),), calls=1, refused=LAYOUT)
def transposed_in_place(x):
    x.t_()
    x.mul_(2)
    return x + 1


@add(one, calls=1, refused=LAYOUT)
def transposed_in_place_not_square(x):
    x.t_()
    x.mul_(2)
    return x + 1


@add(one, calls=1, refused=LAYOUT)
def transposed_in_place_and_only_read(x):
    x.transpose_(0, 1)
    return x + 1


@add(one, calls=1, refused=LAYOUT)
def unsqueezed_in_place(x):
    x.unsqueeze_(0)
    x.add_(1)
    return x * 2


@add(lambda: (ramp(3, 1, 4),), calls=1, refused=LAYOUT)
def squeezed_in_place(x):
    x.squeeze_(1)
    return x.mul_(2).sum(0)


@add(lambda: (ramp(6),), calls=1, refused=LAYOUT)
def resized_smaller_in_place(x):
    x.resize_(4)
    return x + 1


@add(two, calls=1, refused=LAYOUT)
def data_exchanged(x, y):
    x.data = y * 2
    return x + 1


@add(two, calls=1, refused=LAYOUT)
def set_to_another_tensor(x, y):
    x.set_(y.clone())
    return x + 1


@add(lambda: (ramp(2, 3), ramp(3, 2)), calls=1, refused=LAYOUT)
def resize_as_another(x, like):
    return x.resize_as_(like) + 1
