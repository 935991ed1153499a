"""What a graph was made of, looked at before every call: state, submodules, what its code reads and hooks are as they
were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from operator import contains
from typing import Any, Literal

import torch

from graft.api.watched import HOOKS, CodeReads, Entry, is_simple, watched
from graft.base.errors import ChangedModule, ReplacedBuffer
from graft.ir.snapshot import MISSING
from graft.ir.storage import storage_id

STATE = {"_buffers": "buffer", "_parameters": "parameter"}
CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)


class ModuleCheck:
    """Raises when something is another than the graph is bound to, or fixed to. 40 ns an entry.

    `what`: a graph module has "state" and no Python code of its own.
    """

    def __init__(self, module: torch.nn.Module, what: Literal["all", "state"] = "all") -> None:
        parts, own = list(module.named_modules()), what != "state"
        read = watched(module) if own else CodeReads()
        self.known = [*(entry for path, part in parts for entry in entries(path, part, what)), *read.entries]
        self.known += forwards(parts) if own else ()
        self.contents = read.contents
        tables = [(vars(part)[table], path) for path, part in parts for table in HOOKS] if own else []
        self.bare = [table for table, _ in tables if not table]
        self.hooked = [(table, tuple(table), path) for table, path in tables if table]
        self.places = tables
        self.counts = [(p._modules, len(p._modules), path) for path, p in parts if isinstance(p, CONTAINERS) and own]
        self.plain = [vars(part) for _, part in parts if own and "forward" not in vars(part)]
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
        for table, key, value, name, kind in self.contents:
            if type(now := table.get(key, MISSING)) is not type(value) or now != value:
                refuse(now, value, name, kind)
        for tensor, address, name in self.parts_of_weights:
            if tensor.data_ptr() != address:
                raise ChangedModule(f"the memory of {name}", "was replaced (`.data = …`)")
        if self.hooked or any(self.bare):
            self.check_hooks()
        self.check_parts()

    def check_parts(self) -> None:
        for table, count, path in self.counts:
            if len(table) != count:
                raise ChangedModule(part_name(path), f"got or lost submodules ({count} before, {len(table)} now)")
        if any(map(contains, self.plain, repeat("forward"))):
            raise ChangedModule("the forward of one of its modules", "was replaced")

    def check_hooks(self) -> None:
        for table, path in self.places:
            if table and all(table is not known for known, _, _ in self.hooked):
                raise ChangedModule(part_name(path), "got a hook")
        for table, known, path in self.hooked:
            if tuple(table) != known:
                raise ChangedModule(part_name(path), "lost a hook" if len(table) < len(known) else "got a hook")


def part_name(path: str) -> str:
    return f"the module {path}" if path else "the module"


def entries(path: str, part: torch.nn.Module, what: str) -> Iterator[Entry]:
    dot = f"{path}." if path else ""
    for table, kind in STATE.items():
        for name, tensor in vars(part)[table].items():
            yield vars(part)[table], name, tensor, f"{dot}{name}", kind
    if what == "state":
        return
    for name, inner in part._modules.items():
        yield part._modules, name, inner, f"{dot}{name}", "submodule"


def forwards(parts: Sequence[tuple[str, torch.nn.Module]]) -> Iterator[Entry]:
    """Those of objects that have one of their own, and those of their classes."""
    for path, part in parts:
        if "forward" in vars(part):
            yield vars(part), "forward", vars(part)["forward"], f"{path}.forward".lstrip("."), "method"
    for kind in dict.fromkeys(type(part) for _, part in parts):
        if "forward" in vars(kind):
            yield vars(kind), "forward", vars(kind)["forward"], f"{kind.__name__}.forward", "method"


def refuse(now: Any, value: Any, name: str, kind: str) -> None:
    if kind in STATE.values():
        raise ReplacedBuffer(name, kind)
    if kind in ("submodule", "method"):
        raise ChangedModule(f"the {kind} {name}", "was replaced")
    if not is_simple(value) and value is not MISSING:
        raise ChangedModule(f"the {kind} {name}", "was replaced" if now is not MISSING else "was taken away")
    if type(now) is not type(value) or now != value:
        held = "taken away" if now is MISSING else f"set to {now!r:.60}"
        known = "(the graph holds that of its class)" if value is MISSING else f"(the graph holds {value!r:.60})"
        raise ChangedModule(f"the {kind} {name}", f"was {held} {known}")
