"""What a saved module holds, and the folder it is held in.

manifest.json          format and versions, backend, where each tensor is, size and sha256 of each file
graph.json             the transformed graph with its nesting, symbols and abstract values
signature.json         what the graph may be called with
aliases.json           which outputs are which inputs
report.json            what the pipeline did
weights.safetensors    parameters, and buffers that the graphs only read; tied ones once
state.safetensors      buffers that the graphs write (`current/…`) and what reset brings back (`initial/…`)

A module that was captured several times, for several ways through its program, has graph_2.json and so on. Its graphs
share weights and state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from graft.base.errors import ArtifactError
from graft.ir.program.signature import Signature

# 2: 8-bit weights as words of two runs (weights/packing.py); 3: names of attention's arguments; 4: numeric checks
FORMAT = 4
MARK = "graft artifact"
MANIFEST, WEIGHTS, STATE = "manifest.json", "weights.safetensors", "state.safetensors"
TEXTS = ("graph", "signature", "aliases", "report")  # one file of each for every graph


@dataclass(frozen=True)
class SavedGraph:
    """One transformed graph before lowering. `extra`: plain JSON values that the caller wants back."""

    graph_module: GraphModule
    signature: Signature
    aliases: tuple[tuple[Any, ...], ...] = ()  # (output, input, kind)
    report: str = "{}"
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Artifact:
    """The graphs of a module, and all that is needed to go on with it elsewhere.

    `initial` holds the values that reset brings back, by buffer name. `notes` says what is worth knowing about this
    loading (another torch than the one that saved).
    """

    graphs: tuple[SavedGraph, ...]
    backend: str = "eager"
    kernels: Mapping[str, str] = field(default_factory=dict)
    initial: Mapping[str, torch.Tensor] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def text_file(kind: str, number: int) -> str:
    """`graph.json`, then `graph_2.json`…"""
    return f"{kind}.json" if number == 0 else f"{kind}_{number + 1}.json"


def file_names(graphs: int) -> list[str]:
    """All that the manifest of a module with so many graphs vouches for."""
    return [*(text_file(kind, number) for number in range(graphs) for kind in TEXTS), WEIGHTS, STATE]


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a folder that this graft can read; it vouches for itself with a checksum."""
    file = path / MANIFEST
    if not path.exists():
        raise ArtifactError(path, "does not exist; compiled.save(path) writes a folder that graft.load reads")
    if not path.is_dir():
        raise ArtifactError(path, "is a file, but a saved module is a folder; give the folder that save wrote")
    if not file.is_file():
        raise ArtifactError(path, f"has no {MANIFEST}, so it is not a saved module or not all of it is here")
    try:
        manifest = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ArtifactError(file, f"is damaged ({error}); copy the folder again or save the module again") from error
    if not isinstance(manifest, dict) or manifest.get("kind") != MARK:
        raise ArtifactError(file, "is not the manifest of a saved module, or is damaged")
    check_format(file, manifest.get("format"), manifest.get("versions"))
    if manifest.get("sha256") != checksum(manifest):
        raise ArtifactError(file, "was changed after it was saved (its checksum is another); save the module again")
    return manifest


def check_format(file: Path, found: object, versions: object) -> None:
    if found == FORMAT:
        return
    by = versions.get("graft") if isinstance(versions, dict) else None
    saved = f"has format {found} (saved by graft {by or 'of an unknown version'}), but this graft reads {FORMAT}"
    if isinstance(found, int) and found > FORMAT:
        raise ArtifactError(file, f"{saved}; update graft, or save the module again with this one")
    raise ArtifactError(file, f"{saved}; compile the module and save it again with this graft")


def checksum(manifest: Mapping[str, Any]) -> str:
    """Over everything in the manifest but the checksum itself."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
