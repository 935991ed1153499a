"""What merge_gemms and fuse_l2_norm gain: modules with and without them, medians of alternating repeats.

python benchmarks/merge_gemms.py [--device cuda] [--dtype bfloat16] [--repeats 9]
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
import torch.nn.functional as F

import graft
from graft.cli.show import quiet_libraries
from timing import seconds


class Projections(torch.nn.Module):
    """Layers over one input, as the gates of linear attention or several heads have them."""

    def __init__(self, width: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(width, n, bias=False) for n in widths])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x).sum(-1, keepdim=True) for layer in self.layers], -1)


class L2Norm(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


class Normalize(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(x, dim=-1)


# transform, module, width of the input
PROGRAMS: dict[str, tuple[str, Any, int]] = {
    "4 gates of 16 (d 2048)": ("merge_gemms", lambda: Projections(2048, (16,) * 4), 2048),
    "6 heads of 64 (d 512)": ("merge_gemms", lambda: Projections(512, (64,) * 6), 512),
    "3 layers of 576 (d 576)": ("merge_gemms", lambda: Projections(576, (576,) * 3), 576),
    "2 layers of 2048 (d 2048)": ("merge_gemms", lambda: Projections(2048, (2048,) * 2), 2048),
    "rsqrt of the sum (d 128)": ("fuse_l2_norm", L2Norm, 128),
    "F.normalize (d 128)": ("fuse_l2_norm", Normalize, 128),
    "F.normalize (d 2048)": ("fuse_l2_norm", Normalize, 2048),
}


def measure(name: str, rows: int, args: argparse.Namespace) -> str:
    transform, make, width = PROGRAMS[name]
    dtype = getattr(torch, args.dtype)
    x = torch.randn(1, rows, width, device=args.device).to(dtype)
    torch.manual_seed(0)
    modules = [make().eval().requires_grad_(False).to(args.device, dtype) for _ in range(2)]
    without, with_it = (
        graft.compile(m, (x,), config={"transforms": {transform: {"enabled": on}}}, backend="eager")
        for m, on in zip(modules, (False, True), strict=True)
    )
    assert with_it.report.transforms[transform].matches
    with torch.no_grad():
        calls = [lambda call=call: call(x) for call in (without, with_it)]
        pairs = [tuple(seconds(call, args.device, args.least) for call in calls) for _ in range(args.repeats + 1)][1:]
    old, new = (1e6 * statistics.median(times) for times in zip(*pairs, strict=True))
    ratios = sorted(a / b for a, b in pairs)
    spread = f"{ratios[len(ratios) // 4]:.2f} to {ratios[-1 - len(ratios) // 4]:.2f}"
    return f"{name:28} {rows:>4} tokens {old:9.1f} µs {new:9.1f} µs   × {statistics.median(ratios):.2f} ({spread})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 128])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--least", type=float, default=0.02, help="seconds that one timing lasts at least")
    args = parser.parse_args()
    quiet_libraries()
    for name in PROGRAMS:
        for rows in args.rows:
            print(measure(name, rows, args), flush=True)


if __name__ == "__main__":
    main()
