"""A decoder captured by a few of its layers: a layer takes a quarter of a second, and most are alike."""

from __future__ import annotations

import json

from torch.fx import GraphModule
from transformers import PreTrainedModel

from graft.base.errors import DumpError, GraftError
from graft.capture.decoder import CLASS_NAME, capture_decoder, export_decoder
from graft.capture.layer_kinds import LayerKinds, NoKinds, layer_kinds
from graft.capture.repeat_layers import repeat_layers
from graft.capture.skipped_layers import only_chosen
from graft.capture.state import check_captured, check_state
from graft.ir.io.serial import graph_from_json, graph_to_json, json_text
from graft.ir.verify import module_state


def capture_layers_once(model: PreTrainedModel) -> tuple[GraphModule, str]:
    """What `capture_decoder` gives, but for the names of nodes, and how it came."""
    try:
        found = layer_kinds(model)
        gm = captured_by(model, found)
    except NoKinds as error:
        return capture_decoder(model), f"layer by layer, because {error}" if str(error) else ""
    return gm, f"{len(found.chosen)} of {len(found.kinds)} layers, which the others are like"


def captured_by(model: PreTrainedModel, found: LayerKinds) -> GraphModule:
    kept = check_state(model)
    few, state = export_few(model, found), module_state(model)
    try:
        data = repeat_layers(json.loads(graph_to_json(few, exact=True)), found)
    except (DumpError, LookupError, ValueError) as error:  # the whole capture has no such limits
        raise NoKinds(f"its graph cannot be written again ({type(error).__name__}: {error})") from error
    if foreign := [name for name in data["state"] if name not in state]:
        raise NoKinds(f"{foreign[0]} is neither a parameter nor a buffer of it")
    gm = graph_from_json(json_text(data), state)
    type(gm).__name__ = CLASS_NAME  # a GraphModule's class is its own
    check_captured(model, kept, gm)
    return gm


def export_few(model: PreTrainedModel, found: LayerKinds) -> GraphModule:
    """The graph of the chosen layers, where it holds for the others."""
    with only_chosen(model, found) as problems:
        try:
            few = export_decoder(model)
        except GraftError as error:
            raise NoKinds(problems[0] if problems else f"a few of its layers are no program: {error}") from error
    if problems:
        raise NoKinds(problems[0])
    return few
