"""Numbers of a module that Dynamo made inputs: under `dynamic=True` every Python float is one, eps of a norm too.

    before:  %eps = placeholder f64[];  %e = %eps.item();  %a = %mean + %e        after:  %a = %mean + 1e-05

An op's literals are numbers, so nothing that reads such a float would fuse. What a module or a global holds is taken
as a constant: Dynamo is asked to trace the frame again with it, under a guard, as Inductor itself asks for floats
that it cannot make tensors of. A number that keeps changing is an input in later graphs, so that one that is new at
every call does not compile at every call. Floats that are arguments stay inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from graft.backends.inductor import forget_constants, frame_under_way, trace_again
from graft.ir.nodes import placeholders

# By what they hang on: the caller's arguments (and cells of closures, which look the same) are
# GuardSource.LOCAL.
ARGUMENTS = ("LOCAL", "SYNTHETIC_LOCAL", "TEMP_LOCAL", "RANDOM_VALUE")
# Models of one class share a frame. Dynamo gives a frame up after 8 graphs (recompile_limit); half may differ so.
MOST_VALUES = 4


@dataclass(frozen=True)
class FloatInput:
    """One float as Dynamo knows it: its symbol in the graph, its source in the user's program, its value now."""

    symbol: str
    source: str
    value: float


@dataclass
class Constants:
    """What one backend asked Dynamo to make constants of, by frame and position in the user's program."""

    values: dict[tuple[int | None, str], set[float]] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)  # symbols of the compilation under way

    def ask_for(self, gm: GraphModule) -> None:
        """Restarts Dynamo's trace where floats of modules or globals are inputs that do not keep changing."""
        wanted = {found.symbol for found in float_inputs(gm) if self.is_steady(found)} - self.asked
        if wanted:
            self.asked |= wanted
            trace_again(wanted)

    def is_steady(self, found: FloatInput) -> bool:
        frame, first = frame_under_way()
        key = (frame, found.source)
        if first:  # what is known is from before a reset
            self.values.pop(key, None)
        values = self.values.setdefault(key, set())
        if len(values) < MOST_VALUES:
            values.add(found.value)
        return found.value in values

    def settle(self) -> None:
        """The graph is compiled."""
        forget_constants(self.asked)
        self.asked.clear()


def float_inputs(gm: GraphModule) -> Iterator[FloatInput]:
    """The inputs that are floats of a module or a global, read as numbers and as nothing else."""
    for node in placeholders(gm.graph):
        held: Any = getattr(node.meta.get("example_value"), "item_memo", None)
        argument = node.meta.get("grapharg")
        if not isinstance(held, torch.SymFloat) or argument is None or held.node.hint is None:
            continue
        only_read = all(user.target == "item" for user in node.users)
        if only_read and argument.source.guard_source.name not in ARGUMENTS:
            yield FloatInput(str(held.node._expr), source_name(argument.source), float(held.node.hint))


def source_name(source: Any) -> str:
    """`L['self'].eps`: a method up to torch 2.9, a property from then on."""
    return source.name() if callable(source.name) else source.name
