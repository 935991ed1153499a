"""Writes at 0-d tensor positions: captured without reading them, with eager's results."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graft
from graft.base.errors import CaptureError, PositionError

POSITIONS = {
    "one dim": lambda c, p, x: c.__setitem__((slice(None), slice(None), p), x),
    "after an ellipsis": lambda c, p, x: c.__setitem__((..., p, slice(None)), x),
    "first": lambda c, p, x: c.__setitem__(p % 2, x[0, 0]),
    "with a number and a new dim": lambda c, p, x: c.__setitem__((0, ..., p, None, slice(None)), x[0][:, None]),
    "two of them": lambda c, p, x: c.__setitem__((p % 2, slice(None), p), x[0]),
    "slice bounds": lambda c, p, x: c.__setitem__((slice(None), slice(None), slice(p, p + 1)), x[:, :, None]),
    "a number": lambda c, p, x: c.__setitem__((slice(None), 1, p), 2.5),
    "leading ones": lambda c, p, x: c.__setitem__((0, 1, p), x[None, :1, :1]),
    "other dtype": lambda c, p, x: c.__setitem__((slice(None), slice(None), p), x.double()),
}


class Write(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, cache, position, x):
        POSITIONS[self.name](cache, position, x)
        return cache.sum()


@pytest.mark.some(5)
@pytest.mark.parametrize("name", POSITIONS)
def test_0d_positions_write_as_eager_does(name):
    module, x = Write(name), torch.randn(2, 3, 4)
    if name == "slice bounds" and torch.__version__ < "2.12":
        with pytest.raises(CaptureError, match="data-dependent"):  # refused there, not captured for one position
            graft.compile(module, (torch.zeros(2, 3, 8, 4), torch.tensor(3), x))
        return
    compiled = graft.compile(module, (torch.zeros(2, 3, 8, 4), torch.tensor(3), x))
    for position in (0, 5, 7):
        got, expected = torch.zeros(2, 3, 8, 4), torch.zeros(2, 3, 8, 4)
        compiled(got, torch.tensor(position), x)
        module(expected, torch.tensor(position), x)
        assert torch.equal(got, expected) and expected.any()


NUMBERS = {
    "one dim": lambda c, p, x: c.__setitem__((slice(None), slice(None), p), x),
    "after an ellipsis": lambda c, p, x: c.__setitem__((..., p, slice(None)), x),
    "two of them": lambda c, p, x: c.__setitem__((p - p, slice(None), p), x[0]),
    "with a slice": lambda c, p, x: c.__setitem__((slice(1, None), slice(None), p, slice(p - p, 2)), x[1:, :, :2]),
    "a number": lambda c, p, x: c.__setitem__((slice(None), 1, p), 2.5),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_vary_write_as_eager_does(name):
    class Number(nn.Module):
        def forward(self, cache, position, x):
            NUMBERS[name](cache, position, x)
            return cache.sum()

    dynamic = {"cache": None, "position": torch.export.Dim.DYNAMIC, "x": None}
    x = torch.randn(2, 3, 4)
    compiled = graft.compile(Number(), (torch.zeros(2, 3, 8, 4), 3, x), dynamic_shapes=dynamic)
    for position in (2, 5, 7):
        got, expected = torch.zeros(2, 3, 8, 4), torch.zeros(2, 3, 8, 4)
        compiled(got, position, x)
        Number()(expected, position, x)
        assert torch.equal(got, expected) and expected.any()
    with pytest.raises(PositionError, match="position 8 of cache"):
        compiled(torch.zeros(2, 3, 8, 4), 8, x)


def test_a_0d_tensor_beside_other_indices_stays_torch_s_business():
    """Eager takes it for a number there; index_put_ would broadcast it, so the rewrite must not touch it."""

    class Mixed(nn.Module):
        def forward(self, cache, position, x):
            cache[torch.tensor([0, 1]), :, position] = x
            return cache.sum()

    module, x = Mixed(), torch.randn(2, 3, 4)
    got, expected = torch.zeros(2, 3, 8, 4), torch.zeros(2, 3, 8, 4)
    try:
        compiled = graft.compile(module, (got.clone(), torch.tensor(3), x))
    except CaptureError:
        return  # refused, with torch's reason
    compiled(got, torch.tensor(5), x)
    module(expected, torch.tensor(5), x)
    assert torch.equal(got, expected)


MASKS = [((3,), (4, 3)), ((4, 1), (1, 5)), ((4, 3), (3,)), ((4, 3), (4, 3))]


@pytest.mark.parametrize("spelling", ["function", "method", "keywords"])
@pytest.mark.parametrize(
    ("shape", "mask_shape"), [((3,), (4, 3)), ((4, 1), (1, 5)), ((4, 3), (3,)), ((4, 3), (4, 3))]
)
def test_masks_that_broadcast_select_as_in_eager(spelling, shape, mask_shape):
    """With all of the result and with none of it: torch alone fails the first where the mask is larger."""

    class Select(nn.Module):
        def forward(self, x, mask):
            if spelling == "function":
                return torch.masked_select(x, mask) * 2
            return (x.masked_select(mask) if spelling == "method" else torch.masked_select(input=x, mask=mask)) * 2

    x, mask = torch.randn(shape), torch.rand(mask_shape) > 0.4
    compiled = graft.compile(Select(), (x, mask))
    for given in (mask, torch.ones_like(mask), torch.zeros_like(mask)):
        assert torch.equal(compiled(x, given), Select()(x, given))
