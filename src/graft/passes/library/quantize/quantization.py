"""Weights and their quantized forms: which may be changed, what was lost, and when the old ones go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from graft.base.errors import UsageError
from graft.ir.edit import attribute
from graft.ir.nodes import is_weight, where
from graft.ir.patterns.match import NearMiss, Refused
from graft.ir.storage import identity, storage_id
from graft.passes.report import NumericCheck
from graft.weights.quantize import QUANTIZERS, WORKING, abstract
from graft.weights.rounding import HALF, SLACK, Rounding, measure


@dataclass(frozen=True)
class WeightReaders:
    """The weights that a graph reads, and who reads them."""

    gm: GraphModule
    readers: Mapping[int | None, tuple[Node, ...]]  # storage → the attributes in it

    @staticmethod
    def of(gm: GraphModule) -> WeightReaders:
        readers: dict[int | None, tuple[Node, ...]] = {}
        for node in gm.graph.nodes:
            tensor = attribute(gm, str(node.target)) if node.op == "get_attr" else None
            if isinstance(tensor, Tensor):
                storage = storage_id(tensor)
                readers[storage] = (*readers.get(storage, ()), node)
        return WeightReaders(gm, readers)

    @cached_property
    def names(self) -> list[str]:
        return [str(node.target) for nodes in self.readers.values() for node in nodes]


@dataclass(frozen=True)
class Quantized:
    """A weight in another format; the sizes in bytes."""

    name: str
    format: str
    q: Tensor
    scale: Tensor
    rounding: Rounding | None  # None on the meta device, where there is nothing to round
    before: int
    norm: str = ""  # whose weight is in it
    stored: str = ""  # the type of the file whose own blocks these are

    @property
    def after(self) -> int:
        return self.q.nbytes + self.scale.nbytes

    @property
    def numeric_check(self) -> NumericCheck:
        if self.stored:
            return NumericCheck(0.0, 0.0, "the file's own blocks, no")
        if self.rounding is None:
            return NumericCheck(0.0, HALF, "meta tensors, no")
        return NumericCheck(self.rounding.steps, HALF + SLACK, "in steps of the scale, on no")

    @property
    def note(self) -> str:
        error = f"relative error {self.rounding.relative:.2e}" if self.rounding else "no values (meta)"
        error = f"{self.stored} of the file" if self.stored else error
        also = f", times {self.norm}" if self.norm else ""
        return f"{self.name}: {self.format}{also}, {error}, {self.before} → {self.after} bytes"


def check_weight(
    layers: WeightReaders, reader: Node, node: Any, skip: Sequence[str], *, may_be_tied: bool = False, dims: int = 2
) -> None:
    """Refused, at its reader, where this weight stays as it is."""
    problem = weight_problem(layers, node, skip, dims)
    if problem is None and not may_be_tied:
        name = str(node.target)
        others = [n for n in layers.readers.get(storage_id(attribute(layers.gm, name)), ()) if n is not node]
        problem = f"{name} is tied: something else reads it too" if len(node.users) > 1 or others else None
    if problem is not None:
        raise Refused(reader, problem)


def weight_problem(layers: WeightReaders, node: Any, skip: Sequence[str], dims: int) -> str | None:
    """Why this weight cannot have another format, or None."""
    if not isinstance(node, Node) or node.op != "get_attr":
        if is_weight(node) or (isinstance(node, Node) and node.op == "placeholder"):
            return f"the weight {where(node)} is an input of the graph; graft.compile quantizes parameters"
        return "the weight is computed"
    name, tensor = str(node.target), attribute(layers.gm, str(node.target))
    if not isinstance(tensor, torch.nn.Parameter):
        return f"{name} is a buffer, which may be written; only parameters are quantized"
    if tensor.dim() != dims:
        return f"{name} has {tensor.dim()} dims, not {dims}"
    if tensor.dtype not in WORKING:
        return f"{name} is {tensor.dtype}; float32, bfloat16 and float16 are quantized"
    pattern = next((pattern for pattern in skip if pattern_fits(pattern, name)), None)
    if pattern is not None:
        return f"{name} is skipped ({pattern!r})"
    return None


def pattern_fits(pattern: str, name: str) -> bool:
    """Whether a glob fits a dotted name or any run of its parts: `lm_head`, `down_proj`, `layers.0.*`."""
    parts = name.split(".")
    ends = range(1, len(parts) + 1)
    return any(fnmatchcase(".".join(parts[start:end]), pattern) for end in ends for start in range(end))


@dataclass(frozen=True)
class How:
    """The format; whether int4 looks for the best clipping; whether the weight lies as [k, n]; the name of the norm's
    weight that goes into it, and what is added to that."""

    format: str
    search: bool = True
    transposed: bool = False
    norm: str = ""
    shift: float = 0.0


def quantize_weight(gm: GraphModule, name: str, how: How, shared: dict[Any, Any] | None) -> Quantized:
    """The weight in its new format, checked."""
    weight = attribute(gm, name).detach()
    columns = attribute(gm, how.norm).detach().float() + how.shift if how.norm else None  # [k]
    key = ("quantize_linear", how, identity(weight), identity(attribute(gm, how.norm)) if how.norm else None)
    if shared is not None and key in shared:
        return shared[key]
    rows = weight.t() if how.transposed else weight
    if weight.is_meta:
        return Quantized(name, how.format, *abstract(rows, how.format), None, weight.nbytes, how.norm)
    options: dict[str, Any] = {} if columns is None else {"columns": columns}
    options |= {"search": how.search} if how.format == "int4" else {}
    q, scale = QUANTIZERS[how.format](rows, name, **options)
    made = Quantized(name, how.format, q, scale, measure(rows, q, scale, name, columns), weight.nbytes, how.norm)
    if shared is not None:
        shared[key] = made
    return made


def release(gm: GraphModule, owned: torch.nn.Module, *names: str) -> None:
    """Gives up the memory of weights that the graph no longer reads; all parameters are looked at once a call.

    The module keeps parameters of that shape and dtype on the meta device, and refuses to run. The parts that were
    merged into the weight are views of its memory, so they go too.
    """
    weights = [weight for weight in (attribute(gm, name) for name in names) if not weight.is_meta]
    memory = {storage_id(weight) for weight in weights}
    if not memory:
        return
    gone = [p for p in (*gm.parameters(), *owned.parameters()) if storage_id(p) in memory]
    dropped = {id(parameter) for parameter in gone}
    for part in owned.modules():
        for leaf, parameter in part._parameters.items():
            if parameter is not None and id(parameter) in dropped:
                empty = torch.empty_like(parameter, device="meta")
                part._parameters[leaf] = torch.nn.Parameter(empty, requires_grad=False)
    for parameter in gone:
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    refuse_to_run(owned)


def refuse_to_run(module: torch.nn.Module) -> None:
    """A module without its weights says so when it is called, once and for all."""
    if getattr(module, "_graft_released", False):
        return
    module._graft_released = True  # pyrefly: ignore

    def refuse(*_: Any) -> NoReturn:
        raise UsageError(
            "the weights of this module were freed when they were quantized or packed; load the model with"
            " LLM(..., keep_weights=True) to use both"
        )

    module.register_forward_pre_hook(refuse)


def totals(done: Sequence[Quantized], left: Sequence[NearMiss], kept: str, native: bool = False) -> list[str]:
    """Lines for the report."""
    before, after = sum(made.before for made in done), sum(made.after for made in done)
    counts = Counter(f"{made.format} ({made.stored} of the file)" if made.stored else made.format for made in done)
    formats = " and ".join(f"{count} weight{'s' * (count != 1)} as {kind}" for kind, count in counts.items())
    errors = [made.rounding.relative for made in done if made.rounding]
    worst = f", relative error of a weight {max(errors):.2e} at most" if errors else ""
    reasons = "; ".join(dict.fromkeys(miss.reason for miss in left))
    lines = [
        f"quantize_linear: {formats}, {before / 1e6:.1f} → {after / 1e6:.1f} MB{worst};"
        f" left alone: {len(left)}{f' ({reasons})' if left else ''}"
    ]
    if kept:
        lines.append(
            f"quantize_linear: the module keeps its own weights ({kept}); later changes of them are not seen"
        )
    if done[0].q.device.type == "cpu" and not native:
        lines.append("quantize_linear: on a CPU the weights are widened at every call, which is slow")
    return lines
