"""Many programs as one module, each on inputs of its own: one capture and one compilation for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peer_compare import Seen, look
from peer_programs import Program, Table
from torch import nn

SIZE = 16  # larger ones are no faster: a pass over a graph that writes looks at pairs


class Together(nn.Module):
    """Calls every program with its own arguments."""

    def __init__(self, programs: Sequence[Program]) -> None:
        super().__init__()
        self.parts = [program.make() for program in programs]
        self.modules_of_parts = nn.ModuleList([part for part in self.parts if isinstance(part, nn.Module)])

    def forward(self, given: list[tuple[Any, ...]]) -> list[Any]:
        return [part(*args) for part, args in zip(self.parts, given, strict=True)]


def inputs_of(programs: Sequence[Program]) -> tuple[list[tuple[Any, ...]]]:
    return ([program.inputs() for program in programs],)


def look_at_all(run: Any, given: list[tuple[Any, ...]], owner: Together) -> list[Seen]:
    with torch.no_grad():
        results = run(given)
    return [look(*entry) for entry in zip(results, given, owner.parts, strict=True)]


def batches(tables: Sequence[Table], route: str) -> Iterator[tuple[str, list[Program]]]:
    """Programs that hold on this route, in their tables' order; one call or more, as they say."""
    for table in tables:
        fit = [program for program in table.programs if fits(program, route)]
        for once in (False, True):
            group = [program for program in fit if (program.calls == 1) is once]
            for number, first in enumerate(range(0, len(group), SIZE)):
                name = f"{table.name}_{'once_' if once else ''}{number}"
                yield name, group[first : first + SIZE]


def fits(program: Program, route: str) -> bool:
    expected = {**program.gaps, **program.refused}
    return not ({"", route} & expected.keys() or program.dynamic or program.routes or program.config or program.alone)
