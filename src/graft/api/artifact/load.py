"""Reading a saved module: every file is checked before anything of it is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import graft.ops  # noqa: F401  registers graft's ops, which the graph calls
from graft.api.artifact.format import MODULE, STATE, WEIGHTS, Artifact, SavedGraph, file_names, text_file
from graft.base.errors import ArtifactError, DumpError
from graft.base.manifest import OpenFolder
from graft.ir.io.serial import graph_from_json
from graft.ir.program.signature import Signature
from graft.weights.named_tensors import unpack


def read_artifact(path: str | Path) -> Artifact:
    """The saved module as plain data: a graph with abstract values that can be lowered again, state as it was."""
    folder = OpenFolder(Path(path), MODULE)
    try:
        return checked_artifact(folder)
    finally:
        folder.close()


def checked_artifact(folder: OpenFolder) -> Artifact:
    manifest = folder.manifest
    for name in file_names(len(manifest["graphs"])):
        folder.take(name)
    check_devices(folder.path, manifest["devices"])
    weights = load_file(folder.checked_path(WEIGHTS))
    # its own memory, not the file's
    state = {key: tensor.clone() for key, tensor in load_file(folder.checked_path(STATE)).items()}
    current = {key.removeprefix("current/"): t for key, t in state.items() if key.startswith("current/")}
    initial = {key.removeprefix("initial/"): t for key, t in state.items() if key.startswith("initial/")}
    tensors = unpack(manifest["tensors"], weights, current)
    return Artifact(
        tuple(read_graph(folder, number, tensors, extra) for number, extra in enumerate(manifest["graphs"])),
        manifest["backend"],
        manifest["kernels"],
        {name: tensor.to(tensors[name].device) if name in tensors else tensor for name, tensor in initial.items()},
        manifest["extra"],
        version_notes(manifest["versions"]),
    )


def read_graph(folder: OpenFolder, number: int, tensors: dict[str, Any], extra: dict[str, Any]) -> SavedGraph:
    def text(kind: str) -> str:
        return folder.text(text_file(kind, number))

    try:
        gm = graph_from_json(text("graph"), tensors)
        signature = Signature.from_data(json.loads(text("signature")))
    except DumpError as error:
        raise ArtifactError(folder.path / text_file("graph", number), str(error)) from error
    aliases = tuple(tuple(alias) for alias in json.loads(text("aliases")))
    return SavedGraph(gm, signature, aliases, text("report"), extra)


def check_devices(folder: Path, names: list[str]) -> None:
    for name in names:
        device = torch.device(name)
        if device.type in ("cpu", "meta"):
            continue
        backend = getattr(torch, device.type, None)
        count = backend.device_count() if backend is not None and backend.is_available() else 0
        if count <= (device.index or 0):
            raise ArtifactError(
                folder,
                f"was saved for the device {name}, but {device.type} has {count} devices here;"
                " load it where there is one, or compile the module for a device that is here and save that",
            )


def version_notes(saved: dict[str, str]) -> tuple[str, ...]:
    if saved["torch"] == torch.__version__:
        return ()
    return (
        f"saved with torch {saved['torch']}, loaded with {torch.__version__}: results may differ in the last bits",
    )
