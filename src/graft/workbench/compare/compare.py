"""How far graft and Hugging Face are from float64 behind every module, over a prompt and decode steps.

The graph runs node by node, with the kernels that eager calls take. What the backend itself makes of it (native code,
CUDA graphs) shows in the last row, the logits of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from graft.base.device_memory import free_memory, size_text
from graft.base.errors import UsageError
from graft.bench.quality import engine_logits
from graft.capture.cache import captured_decoder
from graft.engine.llm import LLM
from graft.ir.facts import layer_of
from graft.workbench.compare.boundaries import Followed, follow, results
from graft.workbench.compare.probes import (
    LOGITS,
    Values,
    captured_values,
    engine_values,
    exact_values,
    module_values,
)

DRIFT = 2.0  # times Hugging Face's own distance from float64: further off, and drift is said to begin
SAME = 1e-2  # the captured graph is the module: a node further from what the module returned is not its result
NOISE = 4.0  # roundings of the dtype; what is nearer to float64 is not told apart


@dataclass(frozen=True)
class Boundary:
    """Distances from float64, relative to its norm; None where the value is not there to be looked at.

    node, made_by, inside: of graft's graph, see Followed.
    """

    module: str
    kind: str
    prompt: float | None
    decode: float | None
    hf_prompt: float
    hf_decode: float
    node: str = ""
    made_by: str = ""
    inside: str = ""
    noise: float = 0.0

    @property
    def ratio(self) -> float | None:
        """How many times as far from float64 as Hugging Face, in the worse of prompt and decode steps."""
        pairs = [(self.prompt, self.hf_prompt), (self.decode, self.hf_decode)]
        noise = self.noise
        known = [max(ours, noise) / max(theirs, noise) for ours, theirs in pairs if ours is not None]
        return max(known, default=None)


@dataclass(frozen=True)
class Comparison:
    model: str
    dtype: str
    device: str
    backend: str
    tokens: int
    decode_steps: int
    boundaries: tuple[Boundary, ...]
    not_found: tuple[str, ...]  # modules whose result is no node of the captured graph
    weights: str = ""  # the format that they are quantized to: what that costs is not Hugging Face's

    @property
    def drift(self) -> Boundary | None:
        """The first module behind which graft is more than DRIFT times as far from float64 as Hugging Face."""
        return next((b for b in self.boundaries if b.ratio is not None and b.ratio > DRIFT), None)

    @property
    def layers(self) -> tuple[Boundary, ...]:
        """One row a decoder layer, and those outside of all layers."""
        return tuple(b for b in self.boundaries if is_layer(b.module))

    def to_dict(self) -> dict[str, Any]:
        drift = self.drift
        rows = [asdict(b) | {"ratio": b.ratio} for b in self.boundaries]
        return asdict(self) | {"boundaries": rows, "drift": None if drift is None else drift.module}


def is_layer(path: str) -> bool:
    layer = layer_of(path)
    return layer is None or path == f"{layer.stack}.{layer.index}"


@torch.inference_mode()
def compare_modules(llm: LLM, ids: Sequence[int], new: int = 4) -> Comparison:
    """llm: with `keep_weights`, so that the module can run too. ids: the prompt, and `new` tokens to decode."""
    prompt = len(ids) - new
    if prompt < 1 or new < 1:
        raise UsageError(f"{len(ids)} tokens are too few to compare: at least one of a prompt and one to decode")
    require_memory(llm)
    module = llm.model.module
    theirs, exact = module_values(module, ids, prompt), exact_values(module, ids)
    gm = captured_decoder(module)[0]
    nodes = results(gm.graph, {path: value[None] for path, value in theirs.items()})
    nodes = {path: node.name for path, node in nodes.items() if path in exact}
    real = captured_values(gm, ids, nodes)
    nodes = {path: name for path, name in nodes.items() if path in real and near(real[path], theirs[path])}
    final = {node.name for node in llm.graph_module.graph.nodes}
    followed = {path: follow(name, llm.built, final) for path, name in nodes.items()}
    names = {path: one.node for path, one in followed.items() if one.node}
    ours = engine_values(llm, ids, prompt, names)
    kinds = {path: type(part).__name__ for path, part in module.named_modules()}
    rows = [row(path, kinds[path], followed[path], prompt, (ours, theirs, exact)) for path in nodes]
    engine = {LOGITS: engine_logits(llm, ids, decoded=new)}
    left_out = (path for path in theirs if path not in nodes and path != LOGITS and has_weights(module, path))
    rows.append(row(LOGITS, f"backend {llm.backend}", Followed(""), prompt, (engine, theirs, exact)))
    return Comparison(
        llm.model.name, str(module.dtype).removeprefix("torch."), str(llm.device), llm.backend, len(ids), new,
        tuple(rows), tuple(left_out), llm.quantized.format if llm.quantized else "",
    )  # fmt: skip


def require_memory(llm: LLM) -> None:
    needed = sum(p.numel() * 8 for p in llm.model.module.parameters())
    free = free_memory(llm.device)
    if free < needed:
        raise UsageError(
            f"{llm.model.name} in float64 takes {size_text(needed)}, and {size_text(free)} are free; compare a"
            " smaller model of the family"
        )


def has_weights(module: Any, path: str) -> bool:
    return next(module.get_submodule(path).parameters(), None) is not None


def near(found: Tensor, given: Tensor) -> bool:
    return found.shape == given.shape and distance(found, given) < SAME


def distance(found: Tensor, exact: Tensor) -> float:
    """Relative to the norm of `exact`; inf where one is not a number."""
    off = float((found.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-30))
    return off if off == off else float("inf")


def row(path: str, kind: str, found: Followed, prompt: int, values: tuple[Values, Values, Values]) -> Boundary:
    ours, theirs, exact = values
    first, rest, right = slice(0, prompt), slice(prompt, None), exact[path]
    there = path in ours and ours[path].shape == right.shape
    return Boundary(
        path,
        kind,
        prompt=distance(ours[path][first], right[first]) if there else None,
        decode=distance(ours[path][rest], right[rest]) if there else None,
        hf_prompt=distance(theirs[path][first], right[first]),
        hf_decode=distance(theirs[path][rest], right[rest]),
        node=found.node,
        made_by=found.made_by,
        inside=found.inside,
        noise=NOISE * torch.finfo(theirs[path].dtype).eps,
    )
