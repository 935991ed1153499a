"""Defects to plant in transforms of the library, so that `graft check` has something to find."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch

import faulty_ops  # noqa: F401
from graft.ir.edit import Editor
from graft.ir.nodes import module_path
from graft.ir.patterns.match import Refused
from graft.passes.registry import TransformRegistry, load_all

aten = torch.ops.aten
load_all()

# the points of the list, in order
LIST = [
    "registered",
    "listed",
    "docstring",
    "documented",
    "negative tests",
    "matches",
    "dumps",
    "numerics",
    "ops",
    "metadata",
]


def plant(patch: Any, name: str, change: Any) -> None:
    """`change(gm, outcome)` is applied to what the transform did; it gives the outcome back."""
    transform = TransformRegistry.get(name)
    apply = transform.apply
    patch.setattr(transform, "apply", lambda self, gm, context: change(gm, apply(self, gm, context)))


def scale(patch: Any, name: str, factor: float, at: Collection[int] | None = None) -> None:
    """The result of every match (or of those numbered in `at`) is multiplied."""

    def change(gm: Any, outcome: Any) -> Any:
        editor = Editor(gm, name)
        present = {node.name: node for node in gm.graph.nodes}
        matches = list(outcome.matches)
        for index, match in enumerate(matches):
            if at is None or index in at:
                read = [
                    n for n in map(present.get, match.made) if n is not None and n.op == "call_function" and n.users
                ]
                made = read[-1]
                scaled = editor.call(aten.mul.Tensor, (made, factor), before=made.next, like=made)
                editor.replace(made, scaled)
                scaled.update_arg(0, made)  # its own reader too was pointed at the product
                successors = (*match.successors, (made.name, scaled.name))
                matches[index] = replace(match, made=(*match.made, scaled.name), successors=successors)
        return replace(outcome, matches=tuple(matches))

    plant(patch, name, change)


def faulty_swiglu(patch: Any, fault: str, at: int) -> None:
    """The op of one match of fuse_swiglu is wrong in one way (faulty_ops.py)."""

    def change(gm: Any, outcome: Any) -> Any:
        present = {node.name: node for node in gm.graph.nodes}
        (node,) = (n for n in map(present.get, outcome.matches[at].made) if n is not None and n.op == "call_function")
        node.target, node.args, node.kwargs = torch.ops.faulty.gated.default, (*node.args[:2], fault), {}
        return outcome

    plant(patch, "fuse_swiglu", change)


def drop_meta(patch: Any, name: str, key: str = "nn_module_stack") -> None:
    """What the transform makes does not say where it comes from."""

    def change(gm: Any, outcome: Any) -> Any:
        made = {text for match in outcome.matches for text in match.made}
        for node in gm.graph.nodes:
            if node.name in made:
                node.meta.pop(key, None)
        return outcome

    plant(patch, name, change)


def refuse(patch: Any, name: str, place: str) -> None:
    """A pattern transform leaves out the matches whose module contains `place`."""
    transform = TransformRegistry.get(name)
    rewrites = transform.rewrites  # pyrefly: ignore

    def check(rewrite: Any) -> Any:
        def checked(match: Any) -> None:
            if place in module_path(match.anchor):
                raise Refused(match.anchor, "planted: it is refused here")
            if rewrite.check:
                rewrite.check(match)

        return replace(rewrite, check=checked)

    patch.setattr(transform, "rewrites", lambda self: [check(rewrite) for rewrite in rewrites(self)])


GRAPHS: dict[Any, Any] = {}
TRIED: dict[Any, dict[str, Any]] = {}


def capture_once(patch: Any) -> None:
    """Tests check one tiny model many times: its graph is captured for the first of them, and pairs of equal pieces
    are tried for the first of them, as equal layers are within a check. A planted defect makes another pair."""
    from graft.workbench.check import trial

    capture, trials = trial.captured_decoder, trial.MatchTrials

    def captured(model: Any, progress: Any = None) -> Any:
        key = model.config.model_type, model.config.num_hidden_layers, next(model.parameters()).dtype, model.device
        if key not in GRAPHS:
            GRAPHS[key] = capture(model, progress)
        return GRAPHS[key]

    def tried(sides: Any, most: int | None, not_kept: Any) -> Any:
        return trials(sides, most, not_kept, TRIED.setdefault((most, *not_kept.items()), {}))

    patch.setattr(trial, "captured_decoder", captured)
    patch.setattr(trial, "MatchTrials", tried)
