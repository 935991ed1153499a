"""Products for the tests of the native kernel: a case, its call, its float64 reference and how far off it may be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from graft.weights.native_tiles import CPP, STEPS, TiledWeight, pack, unpack
from native_build import Compiled, Target, compiled

SOURCE = (Path(__file__).parent / "native_linear.cpp").read_text()
KINDS = [*CPP, "halves"]  # the last: f16, multiplied as float16 where the CPU can
ACTS = ["none", "silu", "gelu_tanh", "gelu"]
POISON = np.float32(-7.25e20)


@dataclass(frozen=True)
class Product:
    kind: str
    tokens: int
    k: int
    n: int  # columns of the result
    threads: int = 1
    bias: bool = False
    norm: bool = False
    offset: float = 0.0
    normed: bool = False
    act: str = "none"
    residual: bool = False
    in_place: bool = False  # the residual is the result
    gap: int = 0  # floats between rows
    shared: bool = True  # one place for the rows that the threads prepare
    seed: int = 0


@dataclass
class Data:
    x: torch.Tensor  # [tokens, k]
    packed: TiledWeight
    bias: torch.Tensor
    norm: torch.Tensor
    residual: torch.Tensor  # [tokens, n]


def make(p: Product) -> Data:
    g = torch.Generator().manual_seed(p.seed)
    rows = p.n * (1 if p.act == "none" else 2)
    weight = torch.randn(rows, p.k, generator=g) * p.k**-0.5
    return Data(
        torch.randn(p.tokens, p.k, generator=g) * 3, pack(weight, packing(p.kind), p.act != "none"),
        torch.randn(rows, generator=g), torch.randn(p.k, generator=g), torch.randn(p.tokens, p.n, generator=g),
    )  # fmt: skip


def packing(kind: str) -> str:
    return "f16" if kind == "halves" else kind


def library(target: Target) -> Compiled:
    return compiled(SOURCE, ("run_linear",), target)


def strided(t: torch.Tensor, gap: int, fill: float) -> np.ndarray:
    """Rows `gap` floats further apart, with `fill` between them."""
    wide = np.full((max(t.shape[0], 1), t.shape[1] + gap), fill, np.float32)
    wide[: t.shape[0], : t.shape[1]] = t.numpy()
    return wide


def run(p: Product, d: Data, target: Target) -> torch.Tensor:
    """[tokens, n]; nothing outside the result may be written, nothing between rows read."""
    out = np.full((max(p.tokens, 1), p.n + p.gap), POISON, np.float32)
    if p.in_place:
        out[: p.tokens, : p.n] = d.residual.numpy()
    x, residual = strided(d.x, p.gap, np.nan), strided(d.residual, p.gap, np.nan)
    status = np.array([-1], np.int64)
    arrays = [x, d.packed.data.numpy(), d.bias.numpy(), d.norm.numpy(), residual, out,
              np.array([1e-5, p.offset], np.float32), status]  # fmt: skip
    has_residual = 2 if p.in_place else int(p.residual)
    numbers = [KINDS.index(p.kind), p.threads, p.tokens, p.k, p.n, p.k + p.gap, p.n + p.gap, p.n + p.gap, int(p.bias),
               int(p.norm), int(p.normed), ACTS.index(p.act), has_residual, int(p.shared)]  # fmt: skip
    library(target).call("run_linear", arrays, numbers)
    assert status[0] == 0, "the kernel wrote past its scratch"
    assert (out[:, p.n :] == POISON).all(), "the kernel wrote between rows"
    return torch.from_numpy(out[: p.tokens, : p.n].copy())


def rows_of(p: Product, d: Data) -> tuple[torch.Tensor, torch.Tensor]:
    """What the product multiplies, float64 [tokens, k], and by how much rounding ties may change each of it."""
    h = d.x.double()
    if p.norm or p.normed:
        h = h / (h.square().mean(1, keepdim=True) + 1e-5).sqrt()
    if p.norm:
        h = h * (d.norm.double() + p.offset)
    if p.kind in STEPS or p.kind == "halves":
        return h, torch.zeros_like(h)
    blocks = torch.nn.functional.pad(h, (0, -p.k % 32)).unflatten(1, (-1, 32))
    scale = blocks.abs().amax(2, keepdim=True) / 127
    q = torch.where(scale == 0, 0.0, blocks / scale)
    tie = ((q - q.floor() - 0.5).abs() < 1e-4) * scale  # here float32 may round the other way
    return (q.round() * scale).flatten(1)[:, : p.k], tie.flatten(1)[:, : p.k]


def expected(p: Product, d: Data) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in float64 [tokens, n], and the error that float32 sums may have."""
    h, tie = rows_of(p, d)
    weight = unpack(d.packed).double()
    y, slack = h @ weight.T, tie @ weight.abs().T + 3e-6 * (h.abs() @ weight.abs().T)
    if p.kind == "halves":  # float16 sums of 16 and of 64 products may be off by 16 / 2^12 and 64 / 2^12
        slack = slack + (2e-3 if p.tokens <= 4 else 6e-3) * (h.abs() @ weight.abs().T)
    if p.kind == "q4":  # scale * q and the minimum are added apart
        slack = slack + 3e-6 * (h.abs().sum(1, keepdim=True) * weight.abs().amax(1))
    if p.bias:
        y = y + d.bias.double()
    if p.act != "none":
        (gate, up), (gate_slack, up_slack) = y.chunk(2, 1), slack.chunk(2, 1)
        active = {
            "silu": lambda g: g * g.sigmoid(),
            "gelu_tanh": lambda g: torch.nn.functional.gelu(g, approximate="tanh"),
            "gelu": torch.nn.functional.gelu,
        }[p.act](gate)
        # no activation is steeper than 1.13
        y, slack = active * up, 1.13 * gate_slack * up.abs() + active.abs() * up_slack + 2e-6 * (gate * up).abs()
    if p.residual or p.in_place:
        y = y + d.residual.double()
    return y, slack + 1e-6 * y.abs() + 1e-7


def close(found: torch.Tensor, want: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return bool(((found.double() - want[0]).abs() <= want[1]).all())  # a NaN is not close
