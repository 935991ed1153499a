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

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from graft.base.manifest import FolderKind
from graft.ir.program.signature import Signature

# 2: 8-bit weights as words of two runs (weights/packing.py); 3: names of attention's arguments; 4: numeric checks;
# 5: files are hashed in parts
MODULE = FolderKind(
    "graft artifact", 5, "a saved module", "compiled.save(path) writes a folder that graft.load reads",
    "compile the module and save it again",
)  # fmt: skip
WEIGHTS, STATE = "weights.safetensors", "state.safetensors"
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
