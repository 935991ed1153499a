"""Starting a compiled engine: files are checked by threads while the rest is read, and nothing is compiled."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graft.backends.lowered import Lowered
from graft.base.errors import ArtifactError, DumpError, UsageError
from graft.base.kernel_cache import adopt_platform, record, seed
from graft.base.manifest import OpenCheckpoint, OpenFolder
from graft.dist.workers import Workers
from graft.engine.artifact.format import (
    CONFIG,
    ENGINE,
    GRAPH,
    KERNELS,
    OBJECT,
    REFERENCES,
    REPORT,
    STEP,
    TUNED,
    WEIGHTS,
    EngineFolder,
)
from graft.engine.artifact.model import StoredConfig, StoredModule
from graft.engine.artifact.request import SILENT, Starter
from graft.engine.artifact.target import again, check_target
from graft.engine.artifact.tokenizer import read_tokenizer
from graft.engine.kv.tensors import LayerShape
from graft.engine.options import EngineOptions
from graft.engine.ranks.leader import lead
from graft.engine.ranks.task import RankPlace
from graft.engine.setup.build import build_engine
from graft.engine.setup.parts import CacheLayout, EngineParts
from graft.engine.setup.self_check import self_check
from graft.models.loaded import LoadedModel
from graft.models.places import resolve_device
from graft.ops.fused_linear.choice import adopt
from graft.ops.fused_linear.tables import parse_table
from graft.ops.packed_states import StateShape
from graft.weights.mapped import map_tensors, stream_tensors
from graft.weights.quantize import Saving
from graft.weights.references import read_references

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from graft.passes.report import Report


def load_engine(
    path: Path,
    sizes: EngineOptions,
    asked: Mapping[str, Any],
    starter: Starter = SILENT,
    said: str = "",
    place: RankPlace | None = None,
    workers: Workers | None = None,
) -> EngineParts:
    """asked: what LLM was asked for; what contradicts the folder is refused, since nothing is compiled anew. said:
    where it is from, for the report, if it is one of graft's cache. place, workers: see assemble; of an engine that
    was compiled for several ranks."""
    progress = starter.progress
    tell = progress or (lambda *_: None)
    tell("opening the compiled engine", 0, 1)
    folder = EngineFolder(path, None if place is None else place.rank)
    try:
        folder.start_checks()
        manifest = folder.manifest
        if place is not None:
            place.group.agree("compiled engine", manifest["sha256"])
        device = check_request(path, manifest, sizes, asked)
        check_target(path, manifest, device)
        model = stored_model(folder, sizes, with_tokenizer=place is None or place.rank == 0)
        sizes = starter.sizes(sizes, model)
        carried = seed_kernels(folder) if device.type == "cuda" else None
        tell("mapping the weights", 0, 1)
        weights = read_weights(folder, device)
        lowered = native_step(folder, weights) if manifest["native"] else eager_graph(folder, weights)
        texts = folder.text(GRAPH), folder.text(REPORT)
    finally:
        folder.close()
    cache = cache_layout(manifest["cache"])
    tell("making the cache", 0, 1)
    engine, size = build_engine(
        lowered.call, model, cache.layers, cache.block_size, sizes, device, content=cache.content,
        states=cache.states,
        backend=lowered.backend, progress=progress, ends=frozenset(manifest["model"]["end_tokens"]), place=place,
    )  # fmt: skip
    lead(engine, place, workers)
    quantized, checks = manifest["quantized_weights"], sizes.self_check and (place is None or place.rank == 0)
    checked = self_check(engine, model, cache.tensors(), cache.state_names, quantized=quantized, wanted=checks)
    notes = (f"{said or f'compiled engine: {path}'}, {made_here(carried)}", *lowered.notes, checked)
    return EngineParts(
        engine, model, device, lowered.backend, size, cache, partial(read_graph, path, texts[0], weights),
        partial(read_report, texts[1], notes), saving(manifest["quantized"]), manifest["quantized_weights"],
        manifest["kernels"], kept_at=path if said else None,
    )  # fmt: skip


def check_stored(path: Path, sizes: EngineOptions, asked: Mapping[str, Any]) -> str:
    """What would be refused, before anything is started for it; gives the device that was asked for, or is the
    engine's."""
    folder = EngineFolder(path)
    folder.close()
    device = check_request(path, folder.manifest, sizes, asked)
    check_target(path, folder.manifest, device)
    return device.type if asked["device"] == "auto" else asked["device"]


def seed_kernels(folder: OpenFolder) -> int:
    """Triton's kernels into its cache, each after it was checked; how many there are. And the measured choices that
    they were chosen by."""
    record()
    if TUNED in folder.manifest["files"]:
        adopt(parse_table(json.loads(folder.text(TUNED)), folder.path / TUNED))
    adopt_platform(folder.manifest["launcher_platform"])
    names = {name.removeprefix(f"{KERNELS}/"): name for name in folder.names(KERNELS)}
    try:
        seed(names, lambda name: folder.read(names[name]))
    except ValueError as error:
        raise ArtifactError(folder.path, str(error)) from error
    return len({name.partition("/")[0] for name in names})


def made_here(carried: int | None) -> str:
    """What this start compiled: nothing, but for kernels of a GPU that are not in the folder."""
    made = len(record().made) if carried is not None else 0
    brought = "" if carried is None else f"{carried} kernels of Triton were brought along, "
    return f"{brought}{made} were compiled" if made else f"{brought}nothing was compiled"


def check_request(
    path: Path, manifest: dict[str, Any], sizes: EngineOptions, asked: Mapping[str, Any]
) -> torch.device:
    """The device; raises UsageError for what the folder cannot give."""
    model, cache = manifest["model"], manifest["cache"]["layers"]
    device = torch.device(manifest["device"])
    wanted = {"dtype": model["dtype"], "backend": manifest["backend"]}
    for name, saved in wanted.items():
        if asked[name] not in ("auto", saved):
            raise UsageError(f"{path} was compiled with {name}={saved}, not {asked[name]}. {again(path, manifest)}")
    here = resolve_device(asked["device"]) if asked["device"] != "auto" else device
    if here.type != device.type:
        raise UsageError(f"{path} was compiled for {device.type}, not {here.type}. {again(path, manifest)}")
    if here.type == "cuda":
        here = resolve_device(str(here))
    for name in ("config", "quantize", "dump_dir"):
        if asked[name] is not None:
            raise UsageError(f"{name} has no effect on {path}, which is compiled already. {again(path, manifest)}")
    if asked["keep_weights"]:
        raise UsageError(f"{path} holds no Hugging Face module, whose weights could be kept; load the model itself")
    if sizes.kv_cache_dtype == "fp8" and not cache[0][2].startswith("float8"):
        raise UsageError(f"{path} was compiled with a cache in {cache[0][2]}, not fp8. {again(path, manifest)}")
    return here


def stored_model(folder: OpenFolder, sizes: EngineOptions, *, with_tokenizer: bool) -> LoadedModel:
    from graft.models.registry import families

    about = folder.manifest["model"]
    config = StoredConfig(json.loads(folder.text(CONFIG)))
    module: Any = StoredModule(config, getattr(torch, about["dtype"]))
    family = families().get(about["family"])
    tokenizer = read_tokenizer(folder, folder.manifest["fast_tokenizer"]) if with_tokenizer else None
    return LoadedModel(
        about["name"], module, tokenizer, family, sizes.context(about["context"]), notes=tuple(about["notes"])
    )


def read_weights(folder: OpenFolder, device: torch.device) -> dict[str, Tensor]:
    """On a CPU pages of the file, which are shared and read when they are needed."""
    name = folder.whole_name(WEIGHTS)
    file, descriptor = folder.path / name, folder.descriptors[name]
    found = map_tensors(file, descriptor) if device.type == "cpu" else stream_tensors(file, descriptor, device)
    if folder.manifest["checkpoint"] is not None:
        found |= referred_weights(folder, device)
    folder.take(WEIGHTS)  # what was read is what was written
    return found


def referred_weights(folder: OpenFolder, device: torch.device) -> dict[str, Tensor]:
    """Out of the checkpoint, whose files are checked like the folder's own."""
    about = folder.manifest["checkpoint"]
    checkpoint = OpenCheckpoint(Path(about["folder"]), about["files"], ENGINE)
    try:
        checkpoint.start_checks()
        data = json.loads(folder.text(REFERENCES))
        found = read_references(data, checkpoint.path, checkpoint.descriptors, device)
        for name in about["files"]:
            checkpoint.take(name)
    finally:
        checkpoint.close()
    return found


def native_step(folder: OpenFolder, weights: Mapping[str, Tensor]) -> Lowered:
    from graft.backends.native.stored import NativeCall, PlainShell, put_regions, read_program, region_calls

    content = json.loads(folder.text(STEP))
    library = open_library(folder)
    programs = [read_program(data) for data in content["regions"]]
    calls, team = region_calls(programs, library, weights.__getitem__)
    steps = sum(len(program.steps) for program in programs)
    note = (
        f"native: {steps} steps in {len(programs)} regions, threads: {team.count}, {team.instructions}, as compiled"
    )
    if "plain" in content:
        plain = content["plain"]
        taken = tuple((index, tuple(given), tuple(made)) for index, given, made in plain["calls"])
        shell = PlainShell(tuple(plain["inputs"]), taken, tuple(plain["outputs"]))
        return Lowered(NativeCall(shell, calls), "native", {}, (note,))
    from graft.backends.native.lower import bind_shell

    gm = stored_graph(folder, json.dumps(content["graph"]), weights)
    put_regions(gm, calls)
    bound, _ = bind_shell(gm, folder.manifest["kernels"], content["reasons"])
    return Lowered(bound, "native", {}, (note,))


def open_library(folder: OpenFolder) -> ctypes.CDLL:
    """The very file that was checked, whatever lies at its path by now.

    Its descriptor stays open: the loader knows libraries by their names, and would take another file under a number
    that is used again for this one. A library is never unloaded either.
    """
    descriptor = os.dup(folder.take(OBJECT))
    link = Path(f"/proc/self/fd/{descriptor}")
    try:
        return ctypes.CDLL(str(link if link.exists() else folder.path / OBJECT))
    except OSError as error:
        raise ArtifactError(folder.path / OBJECT, f"cannot be loaded: {error}") from error


def eager_graph(folder: OpenFolder, weights: Mapping[str, Tensor]) -> Lowered:
    from graft.backends.select import lower

    lowered = lower(stored_graph(folder, folder.text(GRAPH), weights), "eager", folder.manifest["kernels"])
    return replace(lowered, step=None)


def stored_graph(folder: OpenFolder, text: str, weights: Mapping[str, Tensor]) -> GraphModule:
    """A graph with its tensors; it may call ops of plugins."""
    from graft.ir.io.serial import graph_from_json
    from graft.passes.registry import load_all
    from graft.weights.named_tensors import unpack

    load_all()
    try:
        return graph_from_json(text, unpack(folder.manifest["tensors"], weights, weights))
    except DumpError as error:
        raise ArtifactError(folder.path / GRAPH, str(error)) from error


def read_graph(path: Path, text: str, weights: Mapping[str, Tensor]) -> GraphModule:
    """For whoever looks at it. Weights that kernels read in another form are on the meta device."""
    from graft.ir.io.serial import graph_from_json

    del path
    return graph_from_json(text, weights)


def read_report(text: str, said: tuple[str, ...]) -> Report:
    from graft.passes.report import Report

    report = Report.from_json(text)
    return replace(report, notes=(*report.notes, *said))


def saving(data: Mapping[str, Any] | None) -> Saving | None:
    return None if data is None else Saving(**data)


def cache_layout(data: Mapping[str, Any]) -> CacheLayout:
    layers = tuple(
        LayerShape(heads, dim, getattr(torch, dtype), count) for heads, dim, dtype, count in data["layers"]
    )
    states = tuple(StateShape(tuple(sizes), getattr(torch, dtype)) for sizes, dtype in data["states"])
    names, state_names = tuple(data["names"]), tuple(data["state_names"])
    return CacheLayout(layers, names, data["block_size"], data["content"], states, state_names)
