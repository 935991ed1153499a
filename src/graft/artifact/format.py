"""What a saved module holds, and the folder it is held in.

manifest.json          format and versions, backend, signature, where each tensor is, size and sha256 of each file
graph.json             the transformed graph with its nesting, symbols and abstract values
weights.safetensors    parameters, and buffers that the graph only reads; tied ones once
state.safetensors      buffers that the graph writes (`current/…`) and what reset brings back (`initial/…`)
aliases.json           which outputs are which inputs
report.json            what the pipeline did
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

from graft.errors import ArtifactError
from graft.graph.specs import Signature

FORMAT = 1
MARK = "graft artifact"
MANIFEST, GRAPH, ALIASES, REPORT = "manifest.json", "graph.json", "aliases.json", "report.json"
WEIGHTS, STATE = "weights.safetensors", "state.safetensors"
FILES = (GRAPH, WEIGHTS, STATE, ALIASES, REPORT)  # all that the manifest vouches for


@dataclass(frozen=True)
class Artifact:
    """A transformed graph before lowering, and all that is needed to go on with it elsewhere.

    `initial` holds the values that reset brings back, by buffer name. `signature` follows from the graph where it is
    not given. `notes` says what is worth knowing about this loading (another torch than the one that saved).
    """

    graph_module: GraphModule
    backend: str = "eager"
    kernels: Mapping[str, str] = field(default_factory=dict)
    aliases: tuple[tuple[Any, ...], ...] = ()  # (output, input, kind)
    report: str = "{}"
    config: str = ""
    initial: Mapping[str, torch.Tensor] = field(default_factory=dict)
    signature: Signature | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)  # plain JSON values that the caller wants back
    notes: tuple[str, ...] = ()


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
