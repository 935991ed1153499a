"""Layers of a decoder that are of one kind: what is captured of one of them holds for all of them.

A layer's graph follows from its classes, from what its modules hold, from the sizes of its tensors, from what the
configuration says of it, and from what the model gives to it (`skipped_layers.py` looks at that).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.nn import ModuleList
from transformers import PreTrainedModel

from graft.capture.code import Description, Unknowable, package_of
from graft.capture.fingerprint import ORIGIN, STATE, held_text
from graft.ir.verify import module_state

LEAST = 6  # layers, below which nothing is gained
NUMBER = "layer_idx"  # what transformers calls a layer's own number


class NoKinds(Exception):
    """Why a decoder is captured whole; nothing where it has few layers."""


@dataclass(frozen=True)
class LayerKinds:
    """path: of the list of layers. kinds: for each layer what it is like. chosen: the layers that are captured."""

    path: str
    kinds: tuple[str, ...]
    chosen: tuple[int, ...]


def layer_kinds(model: PreTrainedModel) -> LayerKinds:
    """Of each kind the first, the second and the last layer are captured: the first makes what others share, the
    second stands for those that follow, and the last shows that it may."""
    path, layers = list_of_layers(model)
    state = module_state(layers)
    if len({id(tensor) for tensor in state.values()}) < len(state):
        raise NoKinds("its layers share weights")
    kinds = describe(model, layers)
    chosen = set[int]()
    for kind in dict.fromkeys(kinds):
        numbers = [number for number, one in enumerate(kinds) if one == kind]
        chosen |= {*numbers[:2], numbers[-1]} if len(numbers) > 3 else {*numbers}
    if 2 * len(chosen) > len(kinds):
        raise NoKinds(f"its {len(kinds)} layers are of {len(set(kinds))} kinds")
    return LayerKinds(path, tuple(kinds), tuple(sorted(chosen)))


def list_of_layers(model: PreTrainedModel) -> tuple[str, ModuleList]:
    """The one list of layers that no other list holds."""
    lists = [(name, part) for name, part in model.named_modules() if type(part) is ModuleList and len(part) >= LEAST]
    outer = [(name, part) for name, part in lists if not any(name.startswith(f"{other}.") for other, _ in lists)]
    if len(outer) != 1:
        raise NoKinds(f"it has {len(outer)} lists of layers" if outer else "")
    return outer[0]


def describe(model: PreTrainedModel, layers: ModuleList) -> list[str]:
    homes = (type(part).__module__ for part in model.modules())
    description = Description(home for home in homes if package_of(home) == "transformers")
    try:
        return [description_of(layers, number, model, description) for number in range(len(layers))]
    except Unknowable as error:
        raise NoKinds(str(error)) from error


def description_of(layers: ModuleList, number: int, model: PreTrainedModel, description: Description) -> str:
    lines = [f"{key} {values[number]!r}" for key, values in sorted(lists_of(model.config, len(layers)).items())]
    for name, module in layers[number].named_modules(remove_duplicate=False):
        lines.append(f"{name} {type(module).__module__}.{type(module).__qualname__} {module.training}")
        for key, value in sorted(vars(module).items()):
            known = key in STATE or key in ORIGIN or value is model.config or (key == NUMBER and value == number)
            lines += [] if known else [f"  {key}={value_text(f'{name}.{key}', value, description)}"]
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            sizes = tensor is not None and (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            lines.append(f"  {key} {type(tensor).__name__} {sizes}")
    return "\n".join(lines)


def value_text(name: str, value: Any, description: Description) -> str:
    """Functions have one text for one object, and each layer may have a `partial` of its own."""
    if type(value) is partial:
        return f"partial {id(value.func)} {held_text(name, (value.args, value.keywords), description)}"
    return held_text(name, value, description)


def lists_of(config: Any, count: int) -> dict[str, Sequence[Any]]:
    """What a configuration says of each layer."""
    return {
        key: value for key, value in vars(config).items() if isinstance(value, (list, tuple)) and len(value) == count
    }
