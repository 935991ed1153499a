"""Writing a compiled engine: all of it or nothing, and the same bytes for the same engine."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

import graft
from graft.backends.native.stored import NativeStep, plain_shell, program_data, shell_graph, step_weights
from graft.base.errors import ArtifactError, DumpError
from graft.base.files import Progress, atomic_folder
from graft.base.kernel_cache import launcher_platform, record, used_files
from graft.base.manifest import MANIFEST, OWN_KEYS, OpenFolder, fingerprint, is_marked, write_manifest
from graft.engine.artifact.format import (
    CONFIG,
    ENGINE,
    GRAPH,
    KERNELS,
    OBJECT,
    REFERENCES,
    REPORT,
    SOURCE,
    STEP,
    TOKENIZER,
    TUNED,
    WEIGHTS,
)
from graft.engine.artifact.target import built_for
from graft.engine.artifact.tokenizer import write_tokenizer
from graft.engine.params import SamplingParams
from graft.engine.setup.parts import EngineParts
from graft.ir.edit import attribute
from graft.ir.io.serial import graph_to_json
from graft.ir.nodes import tensor_val
from graft.ir.verify import module_state
from graft.ops.fused_linear.choice import tuned_file
from graft.ops.launch import device_name
from graft.passes.report import Report
from graft.weights.mapped import write_mapped
from graft.weights.named_tensors import entries_data, pack
from graft.weights.references import find_references

PROMPTS = (3, 60, 500, 2000)  # tokens


def save_engine(
    parts: EngineParts,
    path: Path,
    *,
    overwrite: bool,
    made_by: tuple[str, ...],
    progress: Progress | None = None,
    kept_for: Mapping[str, str] | None = None,
    with_weights: bool = False,
) -> None:
    """A folder that graft did not write is never touched; an engine is replaced with `overwrite` alone.

    kept_for: the parts of its key, for one in graft's cache. with_weights: all of them are in the folder; without it,
    on a CPU, those that lie in the model's own folder as kernels read them stay there, if they are most of them.
    """
    check_place(path, overwrite)
    made_by = made_by or parts.command
    if parts.kept_at is not None:
        return copy_engine(parts.kept_at, path, overwrite=overwrite, made_by=made_by)
    refuse_unsavable(parts, path)
    tell = progress or (lambda *_: None)
    with written(path), atomic_folder(path, lambda: check_place(path, overwrite)) as folder:
        tell("writing the graph", 0, 1)
        weights, native, tensors = write_step(parts, folder)
        (folder / GRAPH).write_text(graph_text(parts.graph_module()))
        (folder / REPORT).write_text(lasting_report(parts).to_json())
        (folder / CONFIG).write_text(json.dumps(config_values(parts), indent=1, sort_keys=True))
        fast = write_tokenizer(parts.model.tokenizer, folder / TOKENIZER)
        if parts.device.type == "cuda":
            tell("running prompts, so that their kernels are there", 0, 1)
            run_prompts(parts)
            write_kernels(folder / KERNELS)
            write_tuned(tuned_file(device_name(parts.device)), folder / TUNED)
        tell("writing the weights", 0, 1)
        packed = with_weights or parts.device.type == "cuda"  # a GPU's are read in one go
        checkpoint = None if packed else refer(parts.model.folder, weights, folder)
        write_mapped(folder / WEIGHTS, weights)
        tell("checking what was written", 0, 1)
        about = {
            **describe(parts),
            "tensors": tensors,
            "native": native,
            "fast_tokenizer": fast,
            "checkpoint": checkpoint,
        }
        if parts.device.type == "cuda":
            about["launcher_platform"] = launcher_platform()
        if kept_for is not None:
            about["kept_for"] = dict(kept_for)
        write_manifest(folder, {**about, "made_by": made_by}, ENGINE)


def refer(checkpoint: Path | None, weights: dict[str, Tensor], folder: Path) -> dict[str, Any] | None:
    """Takes those out of `weights` that the checkpoint has; what is to be known of its files."""
    found = find_references(checkpoint, weights) if checkpoint is not None else {}
    if checkpoint is None or 2 * sum(one.size for one in found.values()) < sum(t.nbytes for t in weights.values()):
        return None
    for name in found:
        del weights[name]
    (folder / REFERENCES).write_text(json.dumps({name: one.to_data() for name, one in found.items()}))
    files = sorted({file for one in found.values() for file, _, _ in one.pieces})
    return {"folder": str(checkpoint), "files": {name: fingerprint(checkpoint / name) for name in files}}


def copy_engine(source: Path, path: Path, *, overwrite: bool, made_by: tuple[str, ...]) -> None:
    """Of one in graft's cache, whose files are checked on the way."""
    opened = OpenFolder(source, ENGINE)
    try:
        opened.start_checks()
        about = {name: value for name, value in opened.manifest.items() if name not in ("kept_for", *OWN_KEYS)}
        with written(path), atomic_folder(path, lambda: check_place(path, overwrite)) as folder:
            for name in opened.manifest["files"]:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                with open(os.dup(opened.take(name)), "rb") as file, (folder / name).open("wb") as target:
                    file.seek(0)
                    shutil.copyfileobj(file, target, 1 << 22)
            write_manifest(folder, {**about, "made_by": made_by}, ENGINE)
    finally:
        opened.close()


def stored_bytes(parts: EngineParts) -> int:
    """About what a folder of it takes: its weights."""
    step: NativeStep | None = parts.lowered.step
    if step is None:
        return sum({id(t): t.nbytes for t in module_state(parts.graph_module()).values()}.values())
    return sum(tensor.nbytes for tensor in step_weights(step).values())


@contextmanager
def written(path: Path) -> Iterator[None]:
    try:
        yield
    except (DumpError, OSError) as error:
        raise ArtifactError(path, f"cannot be written: {error}; nothing was left behind") from error


def check_place(path: Path, overwrite: bool) -> None:
    if not path.exists() and not path.is_symlink():
        return
    if not path.is_dir():
        raise ArtifactError(path, "is a file; a compiled engine is a folder, so choose another path")
    present = {entry.name for entry in path.iterdir()}
    if present and (MANIFEST not in present or not is_marked(path, ENGINE)):
        raise ArtifactError(
            path, f"holds files that are no compiled engine, for example {min(present)}; choose another"
        )
    if present and not overwrite:
        raise ArtifactError(path, "holds a compiled engine already; pass overwrite=True (--overwrite) to replace it")


def refuse_unsavable(parts: EngineParts, path: Path) -> None:
    if parts.lowered is None:
        raise ArtifactError(path, "cannot be written: this engine came from an artifact; copy that folder instead")
    if parts.engine.pooling is not None:
        raise ArtifactError(path, "cannot be written: engines that embed are built at each start")
    if parts.backend not in ("native", "eager"):
        raise ArtifactError(
            path, f"cannot be written: backend {parts.backend!r} compiles at every start; use native or eager"
        )


def write_step(parts: EngineParts, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None, list[Any]]:
    """Weights by name, what the native step is, and how the others lie: all that runs."""
    step: NativeStep | None = parts.lowered.step
    if step is None:
        packed = pack([parts.graph_module()])
        return {**packed.weights, **packed.state}, None, entries_data(packed)
    (folder / STEP).parent.mkdir()
    shutil.copyfile(step.built.path, folder / OBJECT)
    shutil.copyfile(step.built.source, folder / SOURCE)
    plain, weights, tensors = plain_shell(step), step_weights(step), []
    if plain is None:
        shell = shell_graph(step)
        packed = pack([used_alone(shell)])
        weights |= {**packed.weights, **packed.state}
        tensors = entries_data(packed)
        content: dict[str, Any] = {
            "graph": json.loads(renamed_symbols(json.loads(graph_to_json(shell, exact=True)))),
            "reasons": dict(step.reasons),
        }
    else:
        content = {"plain": asdict(plain)}
    content |= {"regions": [program_data(call.program) for call in step.calls]}
    (folder / STEP).write_text(json.dumps(content))
    return weights, {"regions": len(step.calls), "eager": plain is None}, tensors


def used_alone(gm: GraphModule) -> GraphModule:
    """The graph with the tensors that it reads, and no others."""
    return GraphModule(
        {str(n.target): attribute(gm, str(n.target)) for n in gm.graph.nodes if n.op == "get_attr"}, gm.graph
    )


def graph_text(gm: GraphModule) -> str:
    """The sizes of weights that were packed and freed are those that the graph recorded."""
    recorded = {str(n.target): tensor_val(n) for n in gm.graph.nodes if n.op == "get_attr"}
    data = json.loads(graph_to_json(gm, exact=True))
    for name, spec in data["state"].items():
        tensor = recorded.get(name)
        if tensor is not None:
            spec["shape"] = [int(size) for size in tensor.shape]
    return renamed_symbols(data)


def renamed_symbols(data: dict[str, Any]) -> str:
    """As JSON, with sizes named s0, s1… as they come: torch's own numbers depend on what was traced before."""
    known = {entry["name"] for entry in data["symbols"]}
    nodes = json.dumps(data["nodes"])
    found = dict.fromkeys(name for name in re.findall(r"\bs\d+\b", nodes) if name in known)
    names = {name: f"s{index}" for index, name in enumerate([*found, *sorted(known - found.keys())])}
    if known & {node["name"] for node in data["nodes"]}:
        return json.dumps(data)  # a node with the name of a size: they stay as they are
    data["symbols"].sort(key=lambda entry: int(names[entry["name"]][1:]))
    text = re.sub(r"\bs\d+\b", lambda match: names.get(match[0], match[0]), json.dumps(data))
    return re.sub(r'"([s\d*+() -]*[*+][s\d*+() -]*)"', lambda match: f'"{ordered(match[1])}"', text)


@cache
def ordered(size: str) -> str:
    """Factors and terms in the order of these names: sympy wrote them in that of the names before."""
    import sympy

    try:
        return str(sympy.sympify(size))
    except (sympy.SympifyError, TypeError, SyntaxError):  # a text that only looks like a size
        return size


def lasting_report(parts: EngineParts) -> Report:
    """Without times and paths, which differ from one build to the next."""
    report = parts.report()
    records = {name: replace(one, seconds=0.0, phases=()) for name, one in report.transforms.items()}
    return replace(report, transforms=records, notes=parts.lasting)


def run_prompts(parts: EngineParts) -> None:
    """Short and long ones, greedy and sampled: what the first request would compile is compiled now."""
    engine, vocabulary = parts.engine, parts.model.module.config.vocab_size
    most = min(parts.model.context - 3, (engine.manager.blocks - 1) * engine.manager.block_size - 3)
    for index, length in enumerate(sorted({min(length, most) for length in PROMPTS})):
        prompt = [(7 * (at + index) + 1) % vocabulary for at in range(length)]  # no two begin alike
        for temperature in (0.0, 0.8):
            params = SamplingParams(max_tokens=2, ignore_eos=True, seed=0, temperature=temperature)
            request = engine.add(prompt, params)
            while request.finish_reason is None:
                engine.step()


def write_kernels(folder: Path) -> None:
    """Triton's, with their launchers, as far as this process has used them."""
    for name, content in used_files(record()).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def write_tuned(own: Path, target: Path) -> None:
    """The measurements of this machine, where `graft tune` has made some; those of graft's own are its sources."""
    if own.is_file():
        shutil.copyfile(own, target)


def config_values(parts: EngineParts) -> Mapping[str, Any]:
    return json.loads(parts.model.module.config.to_json_string(use_diff=False))


def describe(parts: EngineParts) -> dict[str, Any]:
    model, cache, module = parts.model, parts.cache, parts.model.module
    return {
        "versions": {"graft": graft.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "built_for": built_for(parts.device),
        "device": str(parts.device),
        "backend": parts.backend,
        "kernels": dict(parts.kernels),
        "model": {
            "name": model.name,
            "family": model.family.name if model.family else None,
            "context": model.context,
            "notes": list(model.notes),
            "dtype": str(module.dtype).removeprefix("torch."),
            "end_tokens": sorted(parts.engine.end_tokens),
        },
        "cache": {
            "layers": [
                [one.kv_heads, one.head_dim, str(one.dtype).removeprefix("torch."), one.tensors]
                for one in cache.layers
            ],
            "names": list(cache.names),
            "block_size": cache.block_size,
            "content": cache.content,
            "states": [[list(one.sizes), str(one.dtype).removeprefix("torch.")] for one in cache.states],
            "state_names": list(cache.state_names),
        },
        "quantized": asdict(parts.quantized) if parts.quantized else None,
        "quantized_weights": parts.quantized_weights,
    }
