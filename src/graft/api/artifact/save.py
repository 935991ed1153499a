"""Writing a saved module: all of it or nothing."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.fx import GraphModule

import graft
from graft.api.artifact.format import MODULE, STATE, TEXTS, WEIGHTS, Artifact, text_file
from graft.base.errors import ArtifactError, DumpError
from graft.base.files import atomic_folder, is_disk_full
from graft.base.manifest import MANIFEST, is_marked, write_manifest
from graft.ir.io.serial import graph_to_json
from graft.ir.nodes import leaves
from graft.ir.verify import module_state
from graft.weights.named_tensors import PackedTensors, entries_data, pack


def write_artifact(path: str | Path, artifact: Artifact, *, overwrite: bool = False) -> None:
    """Writes the folder beside its place and moves it there when it is whole.

    A folder that graft did not write is never touched; a saved module is replaced with `overwrite` alone.
    """
    target = Path(path)
    check_target(target, overwrite)
    try:
        packed = pack([saved.graph_module for saved in artifact.graphs])
        texts = {name: text for number in range(len(artifact.graphs)) for name, text in graph_texts(artifact, number)}
        manifest = describe(artifact, packed)
    except (DumpError, TypeError) as error:
        raise ArtifactError(target, f"cannot be written: {error}") from error
    try:
        with atomic_folder(target) as folder:
            for name, text in texts.items():
                (folder / name).write_text(text)
            save_tensors(folder / WEIGHTS, packed.weights)
            save_tensors(folder / STATE, state_tensors(packed, artifact.initial))
            write_manifest(folder, manifest, MODULE)
    except OSError as error:
        raise ArtifactError(target, f"cannot be written: {error}; nothing was left behind") from error


def graph_texts(artifact: Artifact, number: int) -> Iterator[tuple[str, str]]:
    saved = artifact.graphs[number]
    yield text_file("graph", number), graph_to_json(saved.graph_module, exact=True)
    yield text_file("signature", number), json.dumps(saved.signature.to_data(), indent=1)
    yield text_file("aliases", number), json.dumps([list(alias) for alias in saved.aliases], indent=1)
    yield text_file("report", number), saved.report


def check_target(target: Path, overwrite: bool) -> None:
    """Raises ArtifactError where something is in the way."""
    try:
        if target.is_dir():
            present = {entry.name for entry in target.iterdir()}
            check_folder(target, present, overwrite)
        elif target.exists() or target.is_symlink():
            raise ArtifactError(target, "is a file; a saved module is a folder, so choose another path")
        target.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(target.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target.parent))
    except OSError as error:
        raise ArtifactError(target, f"cannot be written: {error}") from error


def check_folder(target: Path, present: set[str], overwrite: bool) -> None:
    if not present:
        return
    ours = re.compile(rf"{MANIFEST}|{WEIGHTS}|{STATE}|({'|'.join(TEXTS)})(_\d+)?\.json")
    foreign = sorted(name for name in present if not ours.fullmatch(name))
    if MANIFEST not in present or foreign or not is_marked(target, MODULE):
        example = f", for example {foreign[0]}" if foreign else ""
        raise ArtifactError(target, f"holds files that graft did not write{example}; choose another path")
    if not overwrite:
        raise ArtifactError(target, "holds a saved module already; pass overwrite=True to replace it")


def describe(artifact: Artifact, packed: PackedTensors) -> dict[str, Any]:
    return {
        "versions": {"graft": graft.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "backend": artifact.backend,
        "kernels": dict(artifact.kernels),
        "devices": sorted({name for saved in artifact.graphs for name in devices(saved.graph_module)}),
        "tensors": entries_data(packed),
        "extra": dict(artifact.extra),
        "graphs": [dict(saved.extra) for saved in artifact.graphs],
    }


def devices(gm: GraphModule) -> list[str]:
    """Every device that the graph computes on or keeps state on."""
    values = [leaf for node in gm.graph.nodes for leaf in leaves(node.meta.get("val"))]
    tensors = [*module_state(gm).values(), *(value for value in values if isinstance(value, torch.Tensor))]
    return sorted({str(tensor.device) for tensor in tensors})


def state_tensors(packed: PackedTensors, initial: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    current = {f"current/{key}": tensor for key, tensor in packed.state.items()}
    return current | {f"initial/{name}": values_of(tensor) for name, tensor in initial.items()}


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """safetensors refuses tensors that share memory; here those would be neighbours or equal, so they are copied."""
    seen: set[int] = set()
    ready = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        ready[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    try:
        save_file(ready, path)
    except (SafetensorError, RuntimeError, ValueError, KeyError) as error:
        if is_disk_full(error):
            raise
        raise ArtifactError(path.name, f"cannot be written: {error}") from error
