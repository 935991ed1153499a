"""What each kernel of a decode step costs, layer by layer, and which of them read nothing but activations.

At batch 1 a step lasts as long as its weights and its cache take to read, plus what lies between the reads: a kernel
that reads neither is a boundary that a fusion could take away. Its bytes hardly count, its launch does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from graft.ir.io.text import target_text
from graft.ir.nodes import arg_values, is_op, module_path, options_of, placeholders, source_line, val
from graft.ir.sizes.follow import elements, free_symbols, size_at
from graft.ir.streams import on_device
from graft.passes.registry import TransformRegistry
from graft.passes.report import Report
from graft.workbench.explain import layer_of

Reads = Literal["weights", "cache", "activations"]
aten, ops = torch.ops.aten, torch.ops.graft
ATTENTION = (
    *(ops.rope_attention.default, ops.paged_attention.default, ops.cached_attention.default),
    ops.paged_latent_attention.default,
)
RECURRENT = (ops.stateful_causal_conv.default, ops.stateful_delta_rule.default)
LOOKUPS = (aten.embedding.default, ops.packed_embedding.default)


@dataclass(frozen=True)
class StepShape:
    """A decode step: sequences, and tokens of each before it."""

    batch: int
    context: int


@dataclass(frozen=True)
class Speed:
    """What a machine can do. launch_us: what a kernel takes beyond its bytes. how: where the numbers come from."""

    gb_per_s: float
    launch_us: float
    how: str


@dataclass(frozen=True)
class KernelCost:
    """One call. bytes: read and written; us: estimated from them and the launch. reason: why a fusion left it."""

    layer: int | None
    node: str
    op: str
    module: str
    source: str
    reads: Reads
    bytes: int
    us: float
    measured_us: float | None = None
    reason: str = ""

    @property
    def fused(self) -> bool:
        return self.reads != "activations"

    @property
    def place(self) -> str:
        """The module inside its layer."""
        return re.sub(r"^.*?\.\d+\.?", "", self.module) if self.layer is not None else self.module


@dataclass(frozen=True)
class StepCost:
    model: str
    shape: StepShape
    speed: Speed
    kernels: tuple[KernelCost, ...]
    measured: str = ""  # how, where it was

    @cached_property
    def unfused(self) -> tuple[KernelCost, ...]:
        return tuple(kernel for kernel in self.kernels if not kernel.fused)

    def total(self, kernels: Sequence[KernelCost], *, measured: bool = False) -> float:
        return sum((kernel.measured_us or 0.0) if measured else kernel.us for kernel in kernels)

    def layers(self) -> dict[tuple[int, ...] | None, tuple[KernelCost, ...]]:
        """Layers with equal kernels together, the kernels of the first; then None: those outside the layers."""
        by_layer: dict[int | None, list[KernelCost]] = {}
        for kernel in self.kernels:
            by_layer.setdefault(kernel.layer, []).append(kernel)
        outside = by_layer.pop(None, [])
        groups: dict[Any, list[int]] = {}
        for index, kernels in by_layer.items():
            groups.setdefault(tuple((k.op, k.place, k.bytes, k.fused) for k in kernels), []).append(index or 0)
        found: dict[tuple[int, ...] | None, tuple[KernelCost, ...]] = {
            tuple(indices): tuple(by_layer[indices[0]]) for indices in groups.values()
        }
        return {**found, None: tuple(outside)} if outside else found

    def to_dict(self) -> dict[str, Any]:
        unfused = self.unfused
        return {
            **asdict(self),
            "unfused": {"kernels": len(unfused), "us": self.total(unfused), "of_us": self.total(self.kernels)},
        }


def step_cost(
    gm: GraphModule,
    shape: StepShape,
    speed: Speed,
    report: Report | None = None,
    times: Mapping[str, float] | None = None,
    model: str = "",
    measured: str = "",
) -> StepCost:
    """Of a transformed decoder. times: measured, by node; a call without one is then part of another's kernel."""
    point = sizes_at(gm, shape)
    reasons = dict(missed(report)) if report else {}
    off = dict(switched_off(report)) if report else {}
    kernels = []
    for node in gm.graph.nodes:
        if not on_device(node) or is_view(node, point) or (times is not None and node.name not in times):
            continue
        reads, size = traffic(node, point, shape)
        path = module_path(node)
        kernels.append(
            KernelCost(
                layer_of(path), node.name, target_text(node.target), path, source_line(node), reads, size,
                size / speed.gb_per_s / 1e3 + speed.launch_us, None if times is None else times[node.name],
                reasons.get(node.name, off.get(node.target, "")) if reads == "activations" else "",
            )
        )  # fmt: skip
    return StepCost(model, shape, speed, tuple(kernels), measured)


def missed(report: Report) -> Iterator[tuple[str, str]]:
    """Node and reason, where a fusion almost took it; of several the last one's."""
    for record in report.transforms.values():
        for miss in record.near_misses:
            yield miss.name, f"{record.name}: {miss.reason}"


def switched_off(report: Report) -> Iterator[tuple[Any, str]]:
    """Ops that a transform takes, or says why not, and that it is off."""
    for record in report.transforms.values():
        if record.status == "disabled":
            for op in getattr(TransformRegistry.get(record.name), "explained", ()):
                yield op, f"{record.name} is off"


def sizes_at(gm: GraphModule, shape: StepShape) -> dict[Any, int]:
    """Every free size of the graph in such a step: the first dim of the ids is 1, all tokens lie in the second."""
    point: dict[Any, int] = {}
    for node in placeholders(gm.graph):
        value = val(node)
        if not isinstance(value, torch.Tensor):
            continue
        wanted = (1, shape.batch) if node.name in ("input_ids", "position_ids") else (shape.batch,) * value.dim()
        for size, number in zip(value.shape, wanted, strict=False):
            for symbol in free_symbols([size]):
                point.setdefault(symbol, number)
    return point


def traffic(node: Node, point: Mapping[Any, int], shape: StepShape) -> tuple[Reads, int]:
    """What a call reads beside activations, and all its bytes."""
    written = sum(nbytes(result, point) for result in results(node))
    if is_op(node, *LOOKUPS):
        return "activations", 2 * written  # rows of a table
    reads: Reads = "activations"
    total = written
    for source in node.all_input_nodes:
        if is_cache(source):
            continue
        size = nbytes(source, point)
        if source.op == "get_attr" and isinstance(val(source), torch.Tensor) and val(source).dim() > 1:
            reads, size = "weights", round(size * share_read(node, source, shape))
        total += size
    if is_op(node, *ATTENTION):
        return "cache", total + cache_read(node, shape)
    if is_op(node, *RECURRENT):
        return "cache", total + state_traffic(node, shape)
    return reads, total


def results(node: Node) -> list[Node]:
    """The node, or its parts where it gives several tensors."""
    return [node] if isinstance(val(node), torch.Tensor) else list(node.users)


def is_view(node: Node, point: Mapping[Any, int]) -> bool:
    """A reshape that copies nothing in such a step."""
    if not is_op(node, aten.reshape.default):
        return False
    value = val(node.all_input_nodes[0])
    sizes, strides = ([size_at(one, point) for one in many] for many in (value.shape, value.stride()))
    try:
        torch.empty_strided(sizes, strides, device="meta").view([size_at(one, point) for one in val(node).shape])
    except RuntimeError:
        return False
    return True


def nbytes(node: Node, point: Mapping[Any, int]) -> int:
    value = val(node)
    return elements(node, point) * value.element_size() if isinstance(value, torch.Tensor) else 0


def is_cache(node: Node) -> bool:
    return node.op == "placeholder" and bool(re.match(r"([kv]_(cache|scale)|latent_cache)|state_\d", node.name))


def share_read(node: Node, weight: Node, shape: StepShape) -> float:
    """Of experts those that some token is sent to, if the router spreads them evenly."""
    if not is_op(node, ops.moe_experts.default) or val(weight).dim() < 2:
        return 1.0
    chosen, experts = val(options_of(node)["ids"]).shape[1], val(weight).shape[0]
    return 1 - (1 - int(chosen) / int(experts)) ** shape.batch


def state_traffic(node: Node, shape: StepShape) -> int:
    """Recurrent states of every sequence, read and written."""
    state = val(options_of(node)["state"])
    return 2 * shape.batch * prod(int(size) for size in state.shape[1:]) * state.element_size()


def cache_read(node: Node, shape: StepShape) -> int:
    """Keys and values of every sequence, as far as the window reaches back, or its latent rows."""
    options: dict[str, Any] = {argument.name: value for argument, value in arg_values(node)}
    seen = min(shape.context, options.get("window") or shape.context)
    caches = [val(options[name]) for name in ("k_cache", "v_cache", "latent_cache") if name in options]
    return sum(shape.batch * seen * int(c.shape[2]) * int(c.shape[3]) * c.element_size() for c in caches)
