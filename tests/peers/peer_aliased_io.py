"""Caches that a program is handed or owns, as tests of aliased inputs and outputs (Torch-TensorRT) cover them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from peer_programs import Table, noise, ramp, whole
from torch import nn

ALIASED_IO = Table("aliased_io")
add = ALIASED_IO.add


def step():
    """Keys and values [batch, heads, length, dim], one new token each, and its place."""
    return torch.zeros(2, 2, 8, 4), torch.zeros(2, 2, 8, 4), ramp(2, 2, 1, 4), ramp(2, 2, 1, 4, start=3.0), whole(3)


@add(step)
def one_token_by_index_copy(k, v, new_k, new_v, place):
    k.index_copy_(2, place, new_k)
    v.index_copy_(2, place, new_v)
    return k.sum(2), v.sum(2)


@add(step)
def one_token_by_assignment(k, v, new_k, new_v, place):
    k[:, :, place] = new_k
    v[:, :, place] = new_v
    return (k + v).sum()


@add(step)
def one_token_by_index_put(k, v, new_k, new_v, place):
    rows = torch.arange(2)[:, None, None], torch.arange(2)[:, None], place
    k.index_put_(rows, new_k)
    v.index_put_(rows, new_v, accumulate=True)
    return k, v


@add(step)
def one_token_by_scatter(k, v, new_k, new_v, place):
    index = place.view(1, 1, 1, 1).expand(2, 2, 1, 4)
    k.scatter_(2, index, new_k)
    v.scatter_(2, index, new_v)
    return k.amax(), v.amax()


@add(step)
def fixed_slice(k, v, new_k, new_v, place):
    k[:, :, 2:3] = new_k
    v[:, :, 2:3].copy_(new_v)
    return k[:, :, :3].sum() + v[:, :, :3].sum() + place


@add(step)
def functional_update_returned(k, v, new_k, new_v, place):
    return k.index_copy(2, place, new_k), v.index_copy(2, place, new_v)


@add(step)
def functional_update_copied_back(k, v, new_k, new_v, place):
    k.copy_(k.index_copy(2, place, new_k))
    v.copy_(v.index_copy(2, place, new_v))
    return (k * v).sum(-1)


@add(step)
def cache_updated_and_returned(k, v, new_k, new_v, place):
    return k.index_copy_(2, place, new_k), v.index_copy_(2, place, new_v)


@add(step)
def slice_scatter_copied_back(k, v, new_k, new_v, place):
    k.copy_(torch.slice_scatter(k, new_k, 2, 1, 2))
    return k.sum() + v.sum() + new_v.sum() + place


@add(step, close=True)
def attention_over_the_updated_cache(k, v, new_k, new_v, place):
    k.index_copy_(2, place, new_k)
    v.index_copy_(2, place, new_v)
    seen = (torch.arange(8) <= place)[None]
    return F.scaled_dot_product_attention(new_k, k, v, attn_mask=seen)


@add(lambda: ([torch.zeros(2, 6, 4) for _ in range(3)], ramp(2, 1, 4), whole(5)))
def a_list_of_layers(layers, x, place):
    for layer in layers:
        layer.index_copy_(1, place, x)
        x = x + layer.sum(1, keepdim=True)
    return x


@add(lambda: ({"k": torch.zeros(2, 6), "v": torch.zeros(2, 6)}, ramp(2, 1), whole(0)))
def a_dict_of_caches(caches, x, place):
    caches["k"].index_copy_(1, place, x)
    caches["v"].index_copy_(1, place, x * 2)
    return caches["k"] + caches["v"]


@add(lambda: (torch.zeros(2, 2, 6, 3), ramp(2, 1, 3), whole(4)))
def stacked_layers(kv, x, place):
    for layer in range(2):
        kv[layer].index_copy_(1, place, x + layer)
    return kv[0].sum(1) + kv[1].sum(1)


@add(lambda: (torch.zeros(2, 6, 3), ramp(2, 6, 3)))
def prompt_fills_the_cache(cache, x):
    cache[:, : x.shape[1]].copy_(x)
    return cache.cumsum(1)


@add(lambda: (torch.zeros(12, 3), ramp(4, 3), whole(7, 2, 11, 0)))
def slots_of_a_paged_cache(cache, x, slots):
    cache[slots] = x
    return cache.index_select(0, slots.flip(0))


@add(lambda: (torch.zeros(3, 4, 3), ramp(2, 3), whole(2, 0), whole(1, 3)))
def blocks_and_offsets(cache, x, blocks, offsets):
    cache[blocks, offsets] = x
    return cache.sum((0, 1))


@add(lambda: (torch.zeros(2, 5, 3), ramp(2, 3), whole(1, 4)))
def a_place_for_each_sequence(cache, x, places):
    cache[torch.arange(2), places] = x
    return cache[torch.arange(2), places] + 1


@add(lambda: (torch.zeros(2, 5, 3, dtype=torch.bfloat16), ramp(2, 1, 3), whole(2)))
def cache_of_another_dtype(cache, x, place):
    cache.index_copy_(1, place, x.to(cache.dtype))
    return cache.float() + x


@add(lambda: (torch.zeros(2, 5, 4, dtype=torch.int8), torch.ones(2, 5, 1), ramp(2, 1, 4), whole(1)))
def quantized_cache_and_its_scales(cache, scales, x, place):
    scale = x.amax(-1, keepdim=True) / 4
    cache.index_copy_(1, place, (x / scale).round().to(torch.int8))
    scales.index_copy_(1, place, scale)
    return cache * scales


@add(lambda: (ramp(2, 4, 3), ramp(2, 1, 3, start=9.0)))
def window_that_rolls(window, x):
    window.copy_(torch.cat([window[:, 1:], x], 1))
    return window.sum(1)


@add(lambda: (torch.zeros(3, 2), ramp(3, 2), torch.tensor([True, False, True])))
def masked_update(state, x, active):
    state.copy_(torch.where(active[:, None], state * 0.5 + x, state))
    return state.sum()


@add(lambda: (ramp(2, 3), ramp(2, 3)))
def untouched_input_passes_through(cache, x):
    return cache, cache + x


@add(lambda: (torch.zeros(6, 3), ramp(2, 3), 3))
def slice_at_a_fixed_number(cache, x, start):
    cache[start : start + 2] = x
    return cache.sum(0)


@add(
    lambda: (torch.zeros(2, 6, 3), ramp(2, 1, 3), whole(5)),
    dynamic={"cache": {1: torch.export.Dim.DYNAMIC}, "x": None, "place": None},
)
def cache_of_any_length(cache, x, place):
    cache.index_copy_(1, place, x)
    return cache.sum(1)


class Owned(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("k", "v"):
            self.register_buffer(name, torch.zeros(2, 6, 4))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))


@add(lambda: (ramp(2, 1, 4),), calls=4)
class owned_cache(Owned):
    def forward(self, x):
        self.k.index_copy_(1, self.place, x)
        self.v[:, self.place] = x * 2
        self.place.add_(1)
        return self.k.sum(1) + self.v.sum(1)


@add(lambda: (ramp(2, 1, 4),), calls=3)
class owned_cache_assigned_anew(Owned):
    def forward(self, x):
        self.k = self.k.index_copy(1, self.place, x)
        self.place = self.place + 1
        return self.k.sum(1)


@add(lambda: (ramp(2, 1, 4), ramp(2, 6, 4)), calls=3)
class owned_and_handed_cache(Owned):
    def forward(self, x, other):
        self.k.index_copy_(1, self.place, x)
        other.index_copy_(1, self.place, x + 1)
        self.place.add_(1)
        return (self.k - other).sum()


@add(lambda: (noise(2, 1, 8),), calls=4, close=True)
class decoder_layer_with_its_cache(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        for name in ("k", "v"):
            self.register_buffer(name, torch.zeros(2, 6, 8))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        self.k.index_copy_(1, self.place, k)
        self.v.index_copy_(1, self.place, v)
        scores = (q @ self.k.transpose(1, 2)).masked_fill(torch.arange(6) > self.place, float("-inf"))
        self.place.add_(1)
        return self.out(scores.softmax(-1) @ self.v)
