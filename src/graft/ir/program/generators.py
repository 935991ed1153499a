"""Random number generators while a program is traced: a graph samples from them, and cannot seed them.

    torch.manual_seed(3); y = x + torch.rand(2)          the trace seeds the process once, the graph never
    g = torch.Generator().manual_seed(3)                 begins anew at every call, and never in a graph
    x + random.random()                                  one number for ever

All of that is refused with the line. A generator that the module, the function or an argument holds is sampled from
as in eager. The trace leaves every generator as it was.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graft.base.errors import CaptureError
from graft.ir.branches import all_nodes
from graft.ir.edit import attribute
from graft.ir.nodes import leaves, where
from graft.ir.program.callers import is_torch, line_of
from graft.ir.program.host_samples import host_samples_refused, imports_put_right
from graft.ir.program.own_code import variables
from graft.ir.snapshot import ModuleSnapshot

STATE = frozenset({"manual_seed", "seed", "set_state", "get_state", "initial_seed", "set_offset", "get_offset"})
# between whoever wants the state of a generator and the generator
BETWEEN = frozenset(
    {
        *(__name__, "contextlib", "torch.random", "torch.cuda", "torch.cuda.random", "torch.utils._contextlib"),
        *("torch._compile", "torch._dynamo.eval_frame"),  # around torch.manual_seed once Dynamo is loaded
    }
)
MARK = 0x6F5E_1D2C_3B4A  # a seed that no program uses, to see whether it seeds or reads a generator
OTHER = 0x2A91_C04D_77B3  # another: their difference is a prime, so they leave different remainders
ADVICE = "seed before the call"
NUMBERS = (bool, int, float, str)
FEW = 64  # numbers of a constant that a program makes in Python


class WatchedGenerator:
    """Stands for torch's own generator where torch's functions look it up; touching its state is refused."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator, self._thread, self.seeded_elsewhere = generator, threading.get_ident(), False

    def __getattr__(self, name: str) -> Any:
        if name in STATE and threading.get_ident() != self._thread:
            self.seeded_elsewhere = True
        elif name in STATE:
            caller = asker()
            if not is_torch(caller):
                raise CaptureError(
                    f"forward uses the state of torch's random number generator ({name}, {line_of(caller)}), which a"
                    f" graph does not carry: the trace would do so once, and no call after it; {ADVICE}"
                )
        return getattr(self._generator, name)


def unwatched(generator: Any) -> torch.Generator:
    return generator._generator if isinstance(generator, WatchedGenerator) else generator


def put_generators(host: Any, devices: Any) -> None:
    """Where torch's functions look up torch's own generators."""
    torch.random.default_generator, torch.cuda.default_generators = host, devices


def pointer(generator: Any) -> int:
    """One generator has several Python objects."""
    return generator._cdata


def asker() -> FrameType | None:
    """Who wants the state, past torch's own functions for it."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in BETWEEN:
        frame = frame.f_back
    return frame


@contextmanager
def generators_kept(module: torch.nn.Module, arguments: Any, mark: int = MARK) -> Iterator[list[torch.Generator]]:
    """Within it, `module` is traced; gives the generators that it and its arguments hold, which have `mark` as their
    seed meanwhile.

    Raises CaptureError, at once or at its end, when the program seeds one or samples with Python's or numpy's.
    """
    snapshot = ModuleSnapshot()
    snapshot.add_module(module)
    snapshot.add("arguments", list(arguments))
    held = [value for value in snapshot.seen.values() if isinstance(value, torch.Generator)]
    own = unwatched(torch.random.default_generator)
    marked = [generator for generator in held if pointer(generator) != pointer(own)]
    states = [generator.get_state() for generator in marked]
    devices = tuple(map(unwatched, torch.cuda.default_generators))
    seed, before = own.initial_seed(), own.get_state()
    fresh = state_bytes(torch.Generator().manual_seed(seed))
    begun = fresh == state_bytes(own)  # a program that seeds it so once more could not be seen
    if begun:
        own.manual_seed(seed := mark)
    watched = WatchedGenerator(own), tuple(map(WatchedGenerator, devices))
    try:
        for generator in marked:
            generator.manual_seed(mark)
        with imports_put_right({id(watched[0]): own, id(watched[1]): devices}):
            put_generators(*watched)
            with host_samples_refused(variables(module), snapshot.seen.values()):
                yield held
    finally:
        put_generators(own, devices)
        seeded = [generator for generator in marked if generator.initial_seed() != mark]
        for generator, state in zip(marked, states, strict=True):
            generator.set_state(state)
        again = own.initial_seed() != seed or (not begun and state_bytes(own) == fresh)
        if (begun or again) and not watched[0].seeded_elsewhere:
            own.set_state(before)
    if seeded or (again and not watched[0].seeded_elsewhere):
        raise CaptureError(f"forward seeds a random number generator, which a graph would do never; {ADVICE}")


def state_bytes(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


def refuse_new_generators(gm: GraphModule, held: list[torch.Generator]) -> None:
    """Raises for a generator in the graph that nobody holds: the program makes it, seeded anew at every call."""
    known = set(map(pointer, (*held, torch.default_generator, *torch.cuda.default_generators)))
    for node in all_nodes(gm.graph):
        if node.op == "get_attr":
            value = attribute(gm, str(node.target))
            if isinstance(value, torch.Generator) and pointer(value) not in known:
                raise CaptureError(
                    "forward samples from a torch.Generator that it makes itself, or that neither the module nor an"
                    " argument holds; a graph would go on with one where the program begins anew. Make it an"
                    " attribute of the module, or pass it"
                )


def refuse_seeds(gm: GraphModule, other: GraphModule) -> None:
    """Raises for the seed of a generator, and for what the program makes of it: a number for ever, by which the
    traces with two seeds differ."""
    nodes, others = list(all_nodes(gm.graph)), list(all_nodes(other.graph))
    pairs = zip(nodes, others, strict=False)
    found = next((one for one, two in pairs if called_with(one) != called_with(two)), None)
    if found is None and len(nodes) != len(others):
        found = nodes[-1]
    if found is not None:
        raise CaptureError(
            f"{where(found)} depends on the seed of a generator, which a graph would hold for ever; pass the number"
            " as an argument"
        )


def called_with(node: Node) -> tuple[Any, ...]:
    """What a node is, but for generators and the names of others; of a constant its numbers."""
    value = attribute(node.graph.owning_module, str(node.target)) if node.op == "get_attr" else None
    if isinstance(value, torch.Tensor) and value.numel() <= FEW and not value.is_meta:
        numbers = value.tolist()
    else:
        numbers = [one for one in leaves((node.args, node.kwargs)) if type(one) in NUMBERS]
    return node.op, str(node.target), repr(numbers)  # as text a NaN equals itself
