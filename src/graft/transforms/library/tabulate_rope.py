"""tabulate_rope: cosines and sines are read from tables instead of computed from the positions in every step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from graft.graph.edit import Editor
from graft.graph.match import NearMiss
from graft.graph.memory import mutated_roots
from graft.graph.nodes import calls, is_op, module_path, options_of, tensor_of, where
from graft.transforms.base import BaseTransform, Context, Outcome, TransformConfig, no_match_reason
from graft.transforms.decode import DecodeConfig, elsewhere
from graft.transforms.positions import Computed, computed_from_positions
from graft.transforms.registry import TransformRegistry
from graft.transforms.report import MatchRecord
from graft.transforms.walk import NoFit, require

aten, ops = torch.ops.aten, torch.ops.graft
ROPES = (ops.rope.default, ops.rms_norm_rope.default)
PIECE = 1 << 14  # positions computed at once: bounds what lies in float32 beside the table
TRIALS = ((1, 1), (1, 7), (3, 5), (1, 64))  # shapes of the positions that a table is compared on


@dataclass(frozen=True)
class TabulateConfig(DecodeConfig):
    """limit_mib: how large one table may be."""

    limit_mib: int = 512


@TransformRegistry.register("tabulate_rope")
class TabulateRope(BaseTransform):
    """The cosines and sines of every position of the context are computed once and read from two tables.

    before:  %f = matmul(%inv_freq, to(%position_ids, float32));  …  %c = to(cos(%f), bfloat16);  %s = to(sin(%f), …)
    after:   %c = embedding(%cos_table, %position_ids);  %s = embedding(%sin_table, %position_ids)

    Saves about ten small launches a step. What computes them must treat each position by itself. Numerics: bitwise;
    the tables come from that very piece of the graph, and are compared with it on random positions.
    """

    config: TabulateConfig  # pyrefly: ignore

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        return TabulateConfig

    def apply(self, gm: GraphModule, context: Context) -> Outcome:
        reason = elsewhere(gm, context, self.config.devices)
        if not reason and context.context_length is None:
            reason = "the length of the context is not known, so a table has no end"
        if reason:
            return Outcome(reason=reason, skipped=True)
        pairs = dict.fromkeys(angles(node) for node in calls(gm.graph) if is_op(node, *ROPES))
        if not pairs:
            return Outcome(reason="the graph has no graft::rope")
        editor = Editor(gm, self.name)
        mutated = mutated_roots(gm.graph)
        records, misses = [], []
        for pair in pairs:
            try:
                found = [computed_from_positions(node, mutated) for node in pair]
                tables = [self.table(gm, one, context.context_length or 0) for one in found]
                records.append(write(editor, found, tables))
            except NoFit as stop:
                misses.append(NearMiss(self.name, where(pair[0]), f"%{stop.node.name}", stop.reason, 1, 2))
        return Outcome(tuple(records), tuple(misses), "" if records else no_match_reason(misses))

    def table(self, gm: GraphModule, value: Computed, context: int) -> torch.Tensor:
        """[context, d], bitwise what the graph computes."""
        kind = tensor_of(value.result)
        size = context * int(kind.shape[-1]) * kind.element_size()
        limit = self.config.limit_mib << 20
        require(size <= limit, value.result, f"a table of {size >> 20} MiB is more than {self.config.limit_mib} MiB")
        require(kind.device.type != "meta", value.result, "on the meta device there are no values to put in a table")
        places = torch.arange(context, device=kind.device)[None]  # [1, context]
        table = torch.cat([value.at(gm, piece)[0] for piece in places.split(PIECE, 1)])  # [context, d]
        check_table(gm, value, table)
        return table


def angles(rope: Node) -> tuple[Node, Node]:
    """cos and sin as they are computed, before a dim for the heads is put in where that comes last."""
    options = options_of(rope)
    cos, sin = options["cos"], options["sin"]
    return unwrapped(cos), unwrapped(sin)


def unwrapped(node: Node) -> Node:
    return node.args[0] if is_op(node, aten.unsqueeze.default) else node


def check_table(gm: GraphModule, value: Computed, table: torch.Tensor) -> None:
    """NoFit where the graph computes other bits for random positions than the table holds."""
    generator = torch.Generator().manual_seed(0)
    for shape in TRIALS:
        chosen = torch.randint(0, len(table), shape, generator=generator).to(table.device)
        chosen.view(-1)[0] = len(table) - 1
        same = torch.equal(value.at(gm, chosen), table[chosen])
        require(
            same, value.result, f"{where(value.result)} depends on more than the position: at {shape} others come out"
        )


def write(editor: Editor, found: list[Computed], tables: list[torch.Tensor]) -> MatchRecord:
    made: list[str] = []
    replaced = dict.fromkeys(node.name for one in found for node in one.nodes if node.op == "call_function")
    size = sum(table.numel() * table.element_size() for table in tables)
    note = f"{len(tables)} tables of {list(tables[0].shape)} {tables[0].dtype}, {size / 1e6:.1f} MB"
    result = found[0].result
    anchor, path = where(result), module_path(result)
    for one, table, name in zip(found, tables, ("cos", "sin"), strict=True):
        held = editor.parameter(f"{one.place()}{name}_table", table, before=one.result, like=one.result)
        read = editor.call(aten.embedding.default, (held, one.positions), before=one.result, like=one.result)
        made += [held.name, read.name]
        if one.heads:
            read = editor.call(aten.unsqueeze.default, (read, -3), before=one.result, like=one.result)
            made.append(read.name)
        editor.replace(one.result, read)
    return MatchRecord(anchor, path, tuple(replaced), tuple(made), note)
