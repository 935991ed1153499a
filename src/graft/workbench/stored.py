"""Stored graphs as modules again, and the weights that lie beside them. It needs no model to read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.fx import Graph, GraphModule

from graft.base.errors import DumpError
from graft.base.files import atomic_file, disk_errors
from graft.ir.edit import attach_state
from graft.ir.io.serial import graph_from_json
from graft.passes.dumps import WEIGHTS
from graft.passes.registry import load_all
from graft.weights.named_tensors import entries_data, pack, unpack


def save_state(state: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Writes tensors by name beside the dumps in `folder`, where load_dump finds them. Memory that is shared, as that
    of merged weights and their parts, is stored once."""
    holder = GraphModule(torch.nn.Module(), Graph())
    for name, tensor in state.items():
        attach_state(holder, name, tensor)
    packed = pack([holder])
    target = folder / WEIGHTS

    def refuse(error: Exception) -> DumpError:
        return DumpError(f"cannot write {target}: {error}")

    with disk_errors(target, refuse, (OSError, SafetensorError)), atomic_file(target) as partial:
        save_file(dict(packed.weights), partial, {"entries": json.dumps(entries_data(packed))})


def load_state(folder: str | Path) -> dict[str, torch.Tensor]:
    """The tensors that `save_state` wrote."""
    file = Path(folder) / WEIGHTS
    try:
        with safe_open(file, "pt") as stored:
            entries = json.loads(stored.metadata()["entries"])
            return unpack(entries, {key: stored.get_tensor(key) for key in stored.keys()}, {})  # noqa: SIM118
    except FileNotFoundError as error:
        raise DumpError(f"{file} does not exist; graft dump MODEL -o DIR --weights writes it") from error
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DumpError(f"{file} cannot be read ({error}); dump the model again") from error


def load_dump(path: str | Path, state: Mapping[str, torch.Tensor] | None = None) -> GraphModule:
    """A dumped graph as a module again.

    state: its weights by name. Without it they are read from the weights beside the dump; where there are none, or
    with an empty `state`, they are on the meta device: the graph can be read, not run.
    """
    file = Path(path).with_suffix(".json")
    load_all()  # a graph may call ops of plugins
    try:
        text = file.read_text()
    except FileNotFoundError as error:
        raise DumpError(f"{path} does not exist; graft dump MODEL -o DIR writes dumps") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DumpError(f"{file} cannot be read: {error}; dump the model again") from error
    if state is None and (file.parent / WEIGHTS).is_file():
        state = load_state(file.parent)
    try:
        gm = graph_from_json(text, state)
    except (KeyError, TypeError, AttributeError) as error:
        raise DumpError(f"{file} is no graph that graft wrote ({error!r}); dump the model again") from error
    if state:
        check_complete(gm, state, file)
    return gm


def check_complete(gm: GraphModule, state: Mapping[str, Any], file: Path) -> None:
    """Every weight that the graph reads is there: with one on the meta device it could not be run."""
    missing = sorted({str(node.target) for node in gm.graph.nodes if node.op == "get_attr"} - set(state))
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise DumpError(
            f"{file} reads {', '.join(missing[:3])}{more}, which the given state has not; transforms make weights of"
            " their own, which graft dump --weights keeps"
        )
