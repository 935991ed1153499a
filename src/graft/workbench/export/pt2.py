"""A dumped graph as a program of torch.export: `.pt2`, which torch loads and runs and Netron opens."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graft.base.errors import ExportRefused
from graft.base.files import atomic_file, disk_errors
from graft.ir.effects import is_mutating
from graft.ir.nodes import arg_values, calls
from graft.workbench.discover.values import restore_values
from graft.workbench.export.inputs import dynamic_dims, made_up_arguments
from graft.workbench.op_modules import OWN, op_modules
from graft.workbench.runs import StoredRun, StoredStep


def program_of(run: StoredRun, step: StoredStep) -> tuple[torch.export.ExportedProgram, tuple[str, ...]]:
    """The program, and what it does not carry of the graph."""
    shapes = step.graph()
    restore_values(shapes)
    gm = step.graph(own_storage(run.state()))
    args = made_up_arguments(shapes)
    try:
        with torch.no_grad():
            dims = dynamic_dims(shapes)
            program = torch.export.export(gm, tuple(args), dynamic_shapes=dims, strict=False)
    except Exception as error:  # torch.export raises whatever an op raises; its first line says which
        told = str(error).strip().partition("\n")[0]
        raise ExportRefused(f"torch.export refuses the graph after {step.transform}: {told}") from error
    return program, losses(gm)


def own_storage(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parts of merged weights as tensors of their own: a .pt2 stores whole storages. Equal ones stay one."""
    kept: dict[Any, torch.Tensor] = {}
    found = {}
    for name, tensor in state.items():
        key = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        found[name] = kept.setdefault(key, tensor if whole else tensor.detach().clone())
    return found


def losses(gm: GraphModule) -> tuple[str, ...]:
    """What whoever opens the file has to know."""
    used = sorted({n.target.namespace for n in calls(gm.graph) if hasattr(n.target, "namespace")} - {"aten", "prim"})
    notes = []
    if "graft" in used:
        modules = [one.module for one in op_modules(calls(gm.graph))]
        whose = "graft's ops" if modules == [OWN] else "ops of graft and of plugins"
        notes.append(f"it calls {whose}: import {', '.join(modules)} before torch.export.load")
    notes += [f"it calls ops of {name}: import what registers them" for name in used if name != "graft"]
    written = sorted({s.name for n in calls(gm.graph) if is_mutating(n) for s in written_by(n)})
    if written:
        names = ", ".join(written[:3]) + (f" and {len(written) - 3} more" if len(written) > 3 else "")
        notes.append(f"it writes {names} in place, as the graph does")
    notes.append("names of calls, module paths and source lines stay in the dump")
    return tuple(notes)


def written_by(node: Node) -> list[Node]:
    """Inputs and buffers among what a call writes into."""
    given = [value for argument, value in arg_values(node) if argument.is_write and isinstance(value, Node)]
    return [value for value in given if value.op in ("placeholder", "get_attr")]


def save_program(program: torch.export.ExportedProgram, path: Path) -> None:
    """The file appears whole or not at all."""

    def refuse(error: Exception) -> ExportRefused:
        return ExportRefused(f"{path} cannot be written: {str(error).partition(chr(10))[0]}")

    with disk_errors(path, refuse, (OSError, RuntimeError)), atomic_file(path) as partial, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about its own archive
        torch.export.save(program, str(partial))
