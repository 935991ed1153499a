"""Two blocks whose halves do not need each other, on one stream and on two.

python examples/multistream_overlap.py [--device cpu|cuda] [--streams 2] [--tokens 4] [--trace out.json] [--json]

(a) attention and MLP from one norm, as in Cohere's and GPT-J's blocks; (b) shared and routed experts. The shapes are
small, so that no kernel fills a GPU. Costs are measured, the schedule is made and proven, and the whole block is
captured with and without it; it is taken only where that is faster. On a CPU the schedule is drawn.
The trace opens in ui.perfetto.dev: the predicted schedule, and on a GPU the kernels of one replay.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graft
from graft.api.profile import DeviceMeasure
from graft.memory.stream_hazards import check_streams
from graft.passes.library.streams.schedule import list_schedule
from graft.workbench.trace import gantt, one_stream, overlap, profiled_slots, write_trace


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x)), over a cache of keys and values."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.register_buffer("k", torch.randn(1, heads, length, width // heads))
        self.register_buffer("v", torch.randn(1, heads, length, width // heads))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        h = self.norm(x)  # [tokens, width]
        q, k, v = self.qkv(h).view(1, x.shape[0], 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # [1, heads, tokens, dim]
        self.k.index_copy_(2, positions, k)
        self.v.index_copy_(2, positions, v)
        attended = F.scaled_dot_product_attention(q, self.k, self.v)
        return x + self.o(attended.transpose(1, 2).reshape(x.shape)) + self.down(F.gelu(self.up(h)))


class SharedExperts(nn.Module):
    """x + shared(norm(x)) + routed(norm(x)): two of `experts` for each token, and one MLP for all of them."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, width, width) / width**0.5)
        self.shared_up, self.shared_down = nn.Linear(width, 4 * width, False), nn.Linear(4 * width, width, False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:  # noqa: ARG002 (both blocks take the same)
        h = self.norm(x)  # [tokens, width]
        weights, ids = self.router(h).float().softmax(-1).topk(2)  # [tokens, 2]
        routed = torch.ops.graft.moe_experts(h, weights, ids, self.gate_up, self.down)
        return x + routed + self.shared_down(F.gelu(self.shared_up(h)))


def compiled(block: nn.Module, args: tuple[Tensor, ...], **options: Any) -> graft.CompiledModule:
    config = {"transforms": {"schedule_streams": options}}
    return graft.compile(block, args, config=config, backend="cuda_graph")


@torch.no_grad()
def study(
    name: str, block: nn.Module, args: tuple[Tensor, ...], streams: int, profile: Path
) -> tuple[dict[str, Any], list[Any]]:
    """The numbers of one block, and the rows of its timeline. `profile`: where its costs are written."""
    one = compiled(block, args, enabled=False)
    measure = DeviceMeasure(args, cached=False)
    costs = measure.costs(one.graph_module)
    costs.save(profile)
    options = {"enabled": True, "streams": streams, "profile": str(profile)}
    schedule = list_schedule(one.graph_module.graph, costs, streams)
    result: dict[str, Any] = {
        "block": name,
        "event_us": costs.event_us,
        "predicted_us": {"one stream": schedule.one_us, "several": schedule.many_us, "path": schedule.path_us},
        "streams": schedule.streams,
    }
    rows = [(f"{name}, predicted, one stream", one_stream(schedule)), (f"{name}, predicted", schedule.slots)]
    chosen = compiled(block, args, **options).report.transforms["schedule_streams"]
    result |= {"taken": chosen.status == "applied", "reason": chosen.reason}
    if schedule.streams > 1:
        many = compiled(block, args, **options, force=True)
        check_streams(many.graph_module.graph)
        assert torch.equal(many(*args), one(*args)), "several streams must give the same bits as one"
        result["same_bits"] = True
        if args[0].is_cuda:
            result["measured_us"] = {
                "one stream": measure.whole(one.graph_module),
                "several": measure.whole(many.graph_module),
            }
            slots = replay_slots(many, args)
            result["overlap"] = overlap(slots)
            rows.append((f"{name}, kernels of one replay", slots))
    if not args[0].is_cuda:
        result["gantt"] = gantt(schedule.slots)
    return result, rows


def replay_slots(module: graft.CompiledModule, args: tuple[Tensor, ...]) -> Any:
    """The kernels of one call, as torch's profiler saw them."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    for _ in range(3):
        module(*args)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        module(*args)
        torch.cuda.synchronize()
    return profiled_slots(profile)


def show(result: dict[str, Any]) -> None:
    print(f"\n{result['block']}")
    times = ", ".join(f"{what} {us:.1f} µs" for what, us in result["predicted_us"].items())
    print(f"  predicted: {times}; {result['streams']} streams, {result['event_us']:.1f} µs an event")
    for what, us in result.get("measured_us", {}).items():
        print(f"  measured in a CUDA graph, {what}: {us:.1f} µs")
    if "overlap" in result:
        seen = result["overlap"]
        shares = ", ".join(f"row {row} {share:.0%}" for row, share in seen["busy_by_stream"].items())
        print(f"  kernels {seen['kernel_us']:.1f} µs in {seen['wall_us']:.1f} µs of wall time ({shares} busy)")
        print(f"  while anything ran, {seen['at_once']:.2f} kernels ran at once")
    print(f"  taken: {'yes' if result['taken'] else 'no'}: {result['reason']}")
    for line in result.get("gantt", ()):
        print(f"  {line}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--trace", type=Path, help="where to write the Perfetto trace")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    on_gpu = given.device == "cuda"
    width, length = (1024, 1024) if on_gpu else (128, 128)
    torch.manual_seed(0)
    blocks = {
        "attention and MLP from one norm": ParallelBlock(width, 8, length),
        "shared and routed experts": SharedExperts(width, 16 if on_gpu else 4),
    }
    dtype = torch.bfloat16 if on_gpu else torch.float32
    results, rows = [], []
    for name, block in blocks.items():
        args = (
            torch.randn(given.tokens, width, device=given.device, dtype=dtype),
            torch.arange(given.tokens, device=given.device),
        )
        with TemporaryDirectory() as folder:
            costs = Path(folder) / "costs.json"
            result, drawn = study(name, block.eval().to(given.device, dtype), args, given.streams, costs)
        results.append(result)
        rows += drawn
    if given.trace:
        write_trace(given.trace, rows)
    if given.json:
        print(json.dumps(results, indent=1))
        return
    for result in results:
        show(result)
    if not on_gpu:
        print("\nThis is a CPU: the schedule is computed, proven and drawn, and nothing overlaps here.")
    if given.trace:
        print(f"\ntrace: {given.trace} (open it in ui.perfetto.dev)")


if __name__ == "__main__":
    main()
