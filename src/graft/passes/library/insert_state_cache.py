"""insert_state_cache: recurrences over whole sequences become recurrences over packed tokens and states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from graft.base.errors import LayoutError
from graft.ir.edit import Editor, fake_mode, symbolic_sizes
from graft.ir.nodes import calls, is_op, module_path, placeholders, tensor_of, where
from graft.ir.patterns.match import Match
from graft.ops.layout import STATE_SLOTS, state_name
from graft.ops.packed_states import StateShape
from graft.passes.base import Context
from graft.passes.patterns import PatternMatch, PatternRun, PatternTransform, Rewrite
from graft.passes.registry import TransformRegistry

ops = torch.ops.graft
RECURRENCES = (ops.causal_conv.default, ops.gated_delta_rule.default)
LAYOUT = ("token_to_seq", "cu_seqlens", "seq_lens", "lens_cpu")  # inputs that insert_kv_cache has declared
SLOTS = 29  # the example that the symbol of their number is made of; ops/layout.py has the others


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Literal["none", "silu"]) -> Tensor:
    return ops.causal_conv(x, weight, bias, activation)


def stateful_causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Literal["none", "silu"], state: Tensor,
    state_slots: Tensor, token_to_seq: Tensor, cu_seqlens: Tensor, seq_lens: Tensor, lens_cpu: Tensor,
) -> Tensor:  # fmt: skip
    layout = (state_slots, token_to_seq, cu_seqlens, seq_lens, lens_cpu)
    return ops.stateful_causal_conv(x, weight, bias, state, *layout, activation)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, l2_norm: bool) -> Tensor:
    return ops.gated_delta_rule(q, k, v, g, beta, l2_norm)


def stateful_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, l2_norm: bool, state: Tensor, state_slots: Tensor,
    cu_seqlens: Tensor, seq_lens: Tensor, lens_cpu: Tensor,
) -> Tensor:  # fmt: skip
    return ops.stateful_delta_rule(q, k, v, g, beta, state, state_slots, cu_seqlens, seq_lens, lens_cpu, l2_norm)


@dataclass
class RecurrenceRun(PatternRun):
    """The recurrences that have a state so far."""

    layers: dict[Node, StateShape] = field(default_factory=dict)
    slots: torch.SymInt | int = 0  # of all states


def conv_state(run: RecurrenceRun, match: Match) -> dict[str, Node]:
    """The last inputs, as many as the taps reach back."""
    channels, taps = tensor_of(match.tensors["weight"]).shape
    return add_state(run, match.anchor, StateShape((channels, taps - 1), tensor_of(match.tensors["x"]).dtype))


def rule_state(run: RecurrenceRun, match: Match) -> dict[str, Node]:
    """A matrix a head, in float32 at least: it is rounded at every token."""
    q, v = tensor_of(match.tensors["q"]), tensor_of(match.tensors["v"])
    sizes = (v.shape[2], q.shape[3], v.shape[3])
    return add_state(run, match.anchor, StateShape(sizes, torch.promote_types(q.dtype, torch.float32)))


def add_state(run: RecurrenceRun, node: Node, shape: StateShape) -> dict[str, Node]:
    """One more input, which the op writes; before the first, the slots that all of them read."""
    if not run.layers:
        known = {one.name: one for one in placeholders(run.gm.graph)}
        if missing := [name for name in LAYOUT if name not in known]:
            raise LayoutError(f"{where(node)} needs the inputs {', '.join(missing)}; insert_kv_cache adds them")
        run.shared = {name: known[name] for name in LAYOUT}
        with fake_mode(node):
            example = torch.empty_like(tensor_of(known["seq_lens"]))
        run.shared[STATE_SLOTS] = run.editor.placeholder(STATE_SLOTS, example)
        run.slots = symbolic_sizes(node, [SLOTS])[0]
    with fake_mode(node):
        example = torch.empty((run.slots, *shape.sizes), dtype=shape.dtype, device=tensor_of(node).device)
    name = state_name(len(run.layers))
    run.layers[node] = shape
    return {"state": run.editor.placeholder(name, example)}


CONV = {"x": "b c s", "weight": "c k", "bias": "c"}
RULE = {"q": "b s h d", "k": "b s h d", "v": "b s h w", "g": "b s h", "beta": "b s h"}
REWRITES = (
    Rewrite(causal_conv, stateful_causal_conv, CONV, needs=RECURRENCES[:1], make=conv_state),
    Rewrite(gated_delta_rule, stateful_delta_rule, RULE, needs=RECURRENCES[1:], make=rule_state),
)


@TransformRegistry.register("insert_state_cache")
class InsertStateCache(PatternTransform):
    """Recurrences over whole sequences become recurrences over packed tokens [1, T] that go on from kept states.

    before:  %y = graft.causal_conv(%x, %weight, bias, activation)
             %o = graft.gated_delta_rule(%q, %k, %v, %g, %beta, l2_norm)
    after:   %y = graft.stateful_causal_conv(%x, %weight, bias, %state_0, %state_slots, %token_to_seq, %cu_seqlens,
                                             %seq_lens, %lens_cpu, activation)
             %o = graft.stateful_delta_rule(%q, %k, %v, %g, %beta, %state_1, %state_slots, %cu_seqlens, %seq_lens,
                                            %lens_cpu, l2_norm)

    New inputs, behind the key-value caches: the slot of each sequence, and for every recurrence its states, a slot a
    sequence, written in place. A sequence all of whose tokens are fed is new and starts at zeros, whatever its slot
    holds (ops/packed_states.py).
    Numerics: the same recurrence; sums may run in another order.
    """

    uncheckable = "what it reads depends on states that the graph did not have before"
    lacking = "the graph has no recurrence (graft::causal_conv, graft::gated_delta_rule)"

    def applies(self, gm: GraphModule, context: Context) -> str | None:
        return (
            None if context.route == "decoder" else "the module is not run by graft's engine; its states are its own"
        )

    def start(self, gm: GraphModule, context: Context) -> RecurrenceRun:
        return RecurrenceRun(gm, context, Editor(gm, self.name))

    def rewrites(self) -> Sequence[Rewrite]:
        return REWRITES

    def candidates(self, run: PatternRun) -> Iterator[PatternMatch]:
        """Of both patterns, as they come in the graph: the first state that is wrong is that of the first layer."""
        yield from sorted(super().candidates(run), key=lambda match: match.anchor)

    def finish(self, run: RecurrenceRun) -> None:
        super().finish(run)
        left = next((node for node in calls(run.gm.graph) if is_op(node, *RECURRENCES)), None)
        if left is not None:
            reasons = (miss.reason for miss in run.misses if miss.name == left.name)
            raise LayoutError(next(reasons, f"{where(left)} has no state, without which it cannot decode"))
        run.context.outputs["state_cache"] = tuple(run.layers.values())
        run.context.outputs["state_cache_layers"] = tuple(module_path(node) for node in run.layers)
