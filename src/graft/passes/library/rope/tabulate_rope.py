"""tabulate_rope: cosines and sines are read from tables instead of computed from the positions in every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from graft.ir.nodes import calls, is_op, options_of, tensor_of, where
from graft.ir.patterns.match import Match
from graft.passes.base import Context, TransformConfig
from graft.passes.library.matvec.linears import DecodeConfig, elsewhere
from graft.passes.library.rope.positions import Computed, computed_from_positions
from graft.passes.registry import TransformRegistry
from graft.passes.rewriter import Rewriter, RewriteRun
from graft.passes.walk import require

aten, ops = torch.ops.aten, torch.ops.graft
COS = aten.cos.default
PIECE = 1 << 14  # positions computed at once: bounds what lies in float32 beside the table
TRIALS = ((1, 1), (1, 7), (3, 5), (1, 64))  # shapes of the positions that a table is compared on


@dataclass(frozen=True)
class TabulateConfig(DecodeConfig):
    """limit_mib: how large one table may be."""

    limit_mib: int = 512


@TransformRegistry.register("tabulate_rope")
class TabulateRope(Rewriter):
    """The cosines and sines of every position of the context are computed once and read from two tables.

    before:  %f = matmul(%inv_freq, to(%position_ids, float32));  …  %c = to(cos(%f), bfloat16);  %s = to(sin(%f), …)
    after:   %c = embedding(%cos_table, %position_ids);  %s = embedding(%sin_table, %position_ids)

    Saves about ten small launches a step. What computes them must treat each position by itself. Numerics: bitwise;
    the tables come from that very piece of the graph, and are compared with it on random positions.

    A walk: whatever computes the angles, in any number of steps, is run to fill the tables.
    """

    config: TabulateConfig  # pyrefly: ignore

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        return TabulateConfig

    lacking = "the graph has no graft::rope"

    def applies(self, gm: GraphModule, context: Context) -> str | None:
        unknown = "the length of the context is not known, so a table has no end"
        return elsewhere(gm, context, self.config.devices) or (unknown if context.context_length is None else None)

    def candidates(self, run: RewriteRun) -> list[Angles]:
        found = [angles(node) for node in calls(run.gm.graph) if is_op(node, ops.rope.default)]
        return list(dict.fromkeys(found or spelt_out(run.gm)))

    def find(self, run: RewriteRun, pair: Angles) -> Tabulated:
        found = [computed_from_positions(node, run.mutated) for node in (pair.cos, pair.sin)]
        tables = [self.table(run.gm, one, run.context.context_length or 0) for one in found]
        nodes = dict.fromkeys(node for one in found for node in one.nodes if node.op == "call_function")
        size = sum(table.numel() * table.element_size() for table in tables)
        note = f"{len(tables)} tables of {list(tables[0].shape)} {tables[0].dtype}, {size / 1e6:.1f} MB"
        results = tuple(one.result for one in found)
        return Tabulated(note, {}, {}, tuple(nodes), results, tuple(found), tuple(tables))

    def check(self, run: RewriteRun, match: Tabulated) -> None:
        """What others read stays; that nobody writes to it was seen on the way."""

    def write(self, run: RewriteRun, match: Tabulated) -> list[Node]:
        made, editor = [], run.editor
        for one, table, name in zip(match.found, match.tables, ("cos", "sin"), strict=True):
            held = editor.parameter(f"{one.owner()}{name}_table", table, before=one.result, like=one.result)
            read = editor.call(aten.embedding.default, (held, one.positions), before=one.result, like=one.result)
            made += [held, read]
            if one.heads:
                read = editor.call(aten.unsqueeze.default, (read, -3), before=one.result, like=one.result)
                made.append(read)
            editor.replace(one.result, read)
        return made

    def table(self, gm: GraphModule, value: Computed, context: int) -> torch.Tensor:
        """[context, d], bitwise what the graph computes."""
        kind = tensor_of(value.result)
        size = context * int(kind.shape[-1]) * kind.element_size()
        limit = self.config.limit_mib << 20
        require(size <= limit, value.result, f"a table of {size >> 20} MiB is more than {self.config.limit_mib} MiB")
        require(kind.device.type != "meta", value.result, "on the meta device there are no values to put in a table")
        positions = torch.arange(context, device=kind.device)[None]  # [1, context]
        table = torch.cat([value.at(gm, piece)[0] for piece in positions.split(PIECE, 1)])  # [context, d]
        check_table(gm, value, table)
        return table


@dataclass(frozen=True)
class Angles:
    """cos and sin of a rotation."""

    cos: Node
    sin: Node

    @property
    def anchor(self) -> Node:
        return self.cos


@dataclass(frozen=True)
class Tabulated(Match):
    found: tuple[Computed, ...]
    tables: tuple[torch.Tensor, ...]


def angles(rope: Node) -> Angles:
    """cos and sin as they are computed, before a dim for the heads is put in where that comes last."""
    options = options_of(rope)
    cos, sin = options["cos"], options["sin"]
    return Angles(unwrapped(cos), unwrapped(sin))


def spelt_out(gm: GraphModule) -> Iterator[Angles]:
    """Where rotations are no ops of graft's (`fuse_rope` is off): cosines and sines of the same angles."""
    for node in calls(gm.graph):
        sines = [user for user in node.args[0].users if is_op(user, aten.sin.default)] if is_op(node, COS) else []
        if len(sines) == 1:
            yield Angles(scaled(node), scaled(sines[0]))


def scaled(node: Node) -> Node:
    """The same times a number, and in the dtype of the model."""
    users = list(node.users)
    number = len(users) == 1 and len(users[0].all_input_nodes) == 1
    return scaled(users[0]) if number and is_op(users[0], aten.mul.Tensor, aten.to.dtype) else node


def unwrapped(node: Node) -> Node:
    return node.args[0] if is_op(node, aten.unsqueeze.default) else node


def check_table(gm: GraphModule, value: Computed, table: torch.Tensor) -> None:
    """Refused where the graph computes other bits for random positions than the table holds."""
    generator = torch.Generator().manual_seed(0)
    for shape in TRIALS:
        chosen = torch.randint(0, len(table), shape, generator=generator).to(table.device)
        chosen.view(-1)[0] = len(table) - 1
        same = torch.equal(value.at(gm, chosen), table[chosen])
        require(
            same, value.result, f"{where(value.result)} depends on more than the position: at {shape} others come out"
        )
