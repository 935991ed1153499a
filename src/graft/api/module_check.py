"""What a graph was made of, looked at before every call: state, submodules, numbers and hooks are as they were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any, Literal

import torch

from graft.base.errors import ChangedModule, ReplacedBuffer
from graft.ir.program.own_code import functions, global_names
from graft.ir.snapshot import NUMBERS
from graft.ir.storage import storage_id

Entry = tuple[dict[str, Any], str, Any, str, str]  # table, key, what it holds, the path, and what that is
MISSING = object()
STATE = {"_buffers": "buffer", "_parameters": "parameter"}
HOOKS = ("_forward_pre_hooks", "_forward_hooks")


class ModuleCheck:
    """Raises when something is another than the graph is bound to, or fixed to. 40 ns an entry.

    `what`: a graph module has "state" and no Python code of its own; "code" is all but the tensors.
    """

    def __init__(self, module: torch.nn.Module, what: Literal["all", "state", "code"] = "all") -> None:
        named = set() if what == "state" else {name for found in called(module) for name in global_names(found)}
        parts = list(module.named_modules())
        self.known = [entry for path, part in parts for entry in entries(path, part, named, what)]
        tables = [(getattr(part, table), path) for path, part in parts for table in HOOKS]
        self.hooks = [] if what == "state" else [(table, len(table), path) for table, path in tables]
        self.bare = [table for table, count, _ in self.hooks if not count]
        self.parts_of_weights: list[tuple[torch.Tensor, int, str]] = []

    def watch_memory(self, module: torch.nn.Module, graphs: Sequence[torch.nn.Module]) -> None:
        """A parameter that lies in a weight which a transform made (merged ones) has to stay there."""
        held = [tensor for graph in graphs for tensor in (*graph.parameters(), *graph.buffers())]
        own, storages = {id(tensor) for tensor in held}, {storage_id(tensor) for tensor in held} - {None}
        parts = [(t, name) for name, t in module.named_parameters() if id(t) not in own and storage_id(t) in storages]
        self.parts_of_weights = [(tensor, tensor.data_ptr(), name) for tensor, name in parts if not tensor.is_meta]

    def __call__(self) -> None:
        for table, key, value, name, kind in self.known:
            if table.get(key, MISSING) is not value:
                refuse(table.get(key, MISSING), value, name, kind)
        for tensor, address, name in self.parts_of_weights:
            if tensor.data_ptr() != address:
                raise ChangedModule(f"the memory of {name}", "was replaced (`.data = …`)")
        if any(self.bare):
            path = next(path for table, count, path in self.hooks if len(table) != count)
            raise ChangedModule(f"the module {path}" if path else "the module", "got a hook")


def called(module: torch.nn.Module) -> list[FunctionType]:
    return [found for found in functions(module) if found.__name__ not in ("__init__", "extra_repr")]


def entries(path: str, part: torch.nn.Module, named: set[str], what: str) -> Iterator[Entry]:
    dot = f"{path}." if path else ""
    for table, kind in STATE.items() if what != "code" else ():
        for name, tensor in vars(part)[table].items():
            yield vars(part)[table], name, tensor, f"{dot}{name}", kind
    if what == "state":
        return
    for name, inner in part._modules.items():
        yield part._modules, name, inner, f"{dot}{name}", "submodule"
    for name, value in vars(part).items():
        if name in named and name != "training" and isinstance(value, NUMBERS):
            yield vars(part), name, value, f"{dot}{name}", "attribute"


def refuse(now: Any, value: Any, name: str, kind: str) -> None:
    if kind in STATE.values():
        raise ReplacedBuffer(name, kind)
    if kind == "submodule":
        raise ChangedModule(f"the submodule {name}", "was replaced")
    if type(now) is not type(value) or now != value:
        held = "taken away" if now is MISSING else f"set to {now!r:.60}"
        raise ChangedModule(f"the attribute {name}", f"was {held} (the graph holds {value!r:.60})")
