"""What a rank writes of its engine: its graph, its compiled step and its weights. One that is not split has one."""

from __future__ import annotations

import json
import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

import graft
from graft.backends.native.stored import NativeStep, plain_shell, program_data, shell_graph, step_weights
from graft.base.files import Progress
from graft.base.kernel_cache import launcher_platform, record, used_files
from graft.base.manifest import fingerprint
from graft.base.plugins import fingerprints
from graft.engine.artifact.format import GRAPH, KERNELS, OBJECT, REFERENCES, REPORT, SOURCE, STEP, TUNED, WEIGHTS
from graft.engine.artifact.target import built_for
from graft.engine.params import SamplingParams
from graft.engine.setup.parts import EngineParts
from graft.ir.edit import attribute
from graft.ir.io.serial import graph_to_json
from graft.ir.nodes import tensor_val
from graft.ops.fused_linear.choice import tuned_file
from graft.ops.launch import device_name
from graft.passes.report import Report
from graft.weights.mapped import write_mapped
from graft.weights.named_tensors import entries_data, pack
from graft.weights.references import find_references

PROMPTS = (3, 60, 500, 2000)  # tokens


def write_part(
    parts: EngineParts, folder: Path, with_weights: bool, progress: Progress | None = None, ranks: int = 1
) -> dict[str, Any]:
    """What the manifest says of it. ranks: of which this is one."""
    tell = progress or (lambda *_: None)
    tell("writing the graph", 0, 1)
    weights, native, tensors = write_step(parts, folder)
    (folder / GRAPH).write_text(graph_text(parts.graph_module()))
    (folder / REPORT).write_text(lasting_report(parts).to_json())
    on_gpu = parts.device.type == "cuda"
    if on_gpu:
        write_kernels(folder / KERNELS)
        write_tuned(tuned_file(device_name(parts.device)), folder / TUNED)
    tell("writing the weights", 0, 1)
    packed = with_weights or on_gpu  # a GPU's are read in one go
    checkpoint = None if packed else refer(parts.model.folder, weights, folder, ranks)
    write_mapped(folder / WEIGHTS, weights)
    platforms = {"launcher_platform": launcher_platform()} if on_gpu else {}
    return {**describe(parts), "tensors": tensors, "native": native, "checkpoint": checkpoint, **platforms}


def refer(checkpoint: Path | None, weights: dict[str, Tensor], folder: Path, ranks: int = 1) -> dict[str, Any] | None:
    """Takes those out of `weights` that the checkpoint has; what is to be known of its files."""
    found = find_references(checkpoint, weights, ranks) if checkpoint is not None else {}
    if checkpoint is None or 2 * sum(one.size for one in found.values()) < sum(t.nbytes for t in weights.values()):
        return None
    for name in found:
        del weights[name]
    (folder / REFERENCES).write_text(json.dumps({name: one.to_data() for name, one in found.items()}))
    files = sorted({piece.file for one in found.values() for piece in one.pieces})
    return {"folder": str(checkpoint), "files": {name: fingerprint(checkpoint / name) for name in files}}


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
    plugins = fingerprints()
    return {
        "versions": {"graft": graft.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "built_for": built_for(parts.device),
        **({"plugins": plugins} if plugins else {}),
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
