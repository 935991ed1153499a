"""What exists already for a piece: graft's transforms are run on it, other kernels are compared with it by value."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.fx import GraphModule

import graft
from graft.ir.edit import second_module
from graft.ir.io.text import target_text
from graft.ir.nodes import calls
from graft.ops import OPS
from graft.passes.base import Context
from graft.passes.config import PipelineConfig, load_config
from graft.passes.pipeline import run_pipeline
from graft.passes.registry import TransformRegistry
from graft.workbench.discover.calls import is_free, is_graft

Where = Literal["graft", "aten", "inductor", "installed"]
ROOT = Path(graft.__file__).parent.parent
# They change what a graph computes, or write kernels of their own: not what exists for a piece.
NOT_FOR_PIECES = (
    *("last_token_logits", "insert_kv_cache", "insert_state_cache", "update_state_in_place"),
    *("merge_qkv", "merge_gate_up", "merge_gemms"),
    *("quantize_linear", "widen_linear", "schedule_streams", "tabulate_rope"),
)


@dataclass(frozen=True)
class Existing:
    """A kernel that computes the piece. `transforms`: those of graft that put it there; `note`: what to know."""

    where: Where
    symbol: str
    file: str
    transforms: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class GraftLookup:
    """What graft's own transforms make of a piece. `whole`: nothing but graft's ops and views is left."""

    found: tuple[Existing, ...]
    transforms: tuple[str, ...]
    rewritten: GraphModule
    whole: bool
    covered: int  # calls of the piece that they take
    misses: tuple[str, ...] = ()


def look_in_graft(gm: GraphModule) -> GraftLookup:
    """Runs the library on a copy of the piece, which has no state: first what asks for no device, then all of it."""
    first = transformed(gm, devices=False)
    return first if first.whole else max(first, transformed(gm, devices=True), key=lambda found: found.covered)


def transformed(gm: GraphModule, devices: bool) -> GraftLookup:
    twin = second_module(gm)
    names = {node.name for node in calls(gm.graph) if not is_free(node)}
    report = run_pipeline(twin, library(devices), Context(route="decoder"))
    fired = [record for record in report.transforms.values() if record.matches]
    left = [node for node in calls(twin.graph) if not is_free(node)]
    stayed = {node.name for node in left if node.name in names}
    made = list(dict.fromkeys(node.target for node in left if node.name not in names))
    transforms = tuple(record.name for record in fired)
    found = tuple(graft_op(target, transforms) for target in made if is_graft(target))
    misses = {f"{r.name}: {miss.reason}" for r in report.transforms.values() for miss in r.near_misses}
    whole = bool(fired) and not stayed and all(is_graft(target) for target in made)
    return GraftLookup(found, transforms, twin, whole, len(names) - len(stayed), tuple(sorted(misses)))


def library(devices: bool) -> PipelineConfig:
    """Every fusion on, whatever the default says. A transform that fails on a piece is passed over."""
    config = load_config()
    chosen: dict[str, Any] = {}
    for name, settings in config.transforms.items():
        gpu = has_devices(settings)
        on = name not in NOT_FOR_PIECES and (devices or not gpu)
        opened: dict[str, Any] = {"devices": ("cuda", "cpu", "meta")} if gpu else {}
        chosen[name] = replace(settings, enabled=on, on_error="skip", **opened)
    return replace(config, transforms=chosen)


def has_devices(settings: Any) -> bool:
    return any(f.name == "devices" for f in fields(settings))


def graft_op(target: Any, transforms: tuple[str, ...]) -> Existing:
    symbol = target_text(target).replace("graft.", "graft::")
    spec = OPS[target._schema.name.removeprefix("graft::")]
    folder = Path(inspect.getsourcefile(spec.reference) or "").parent
    return Existing("graft", symbol, shown(folder / "op.py"), transforms)


def transform_sites(names: Iterable[str]) -> list[str]:
    """`fuse_rms_norm (graft/passes/library/norms/fuse_rms_norm.py)`."""
    return [f"{name} ({transform_file(name)})" for name in names]


def transform_file(name: str) -> str:
    return shown(Path(inspect.getsourcefile(TransformRegistry.get(name)) or ""))


def shown(file: Path) -> str:
    """From graft's folder on; a plugin's as it is."""
    return str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else str(file)


def torch_file(relative: str) -> str | None:
    """`torch/…` where the installed torch has that file."""
    path = Path(torch.__file__).parent / relative
    return f"torch/{relative}" if path.is_file() else None
