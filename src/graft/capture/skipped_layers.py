"""A model with a few of its layers: the others are called, look at what they are given, and give it back.

So the model's own loop runs as it always does, over as many layers, with the right numbers. What it gives to a layer
that is left out, besides the hidden states, must be what it gave to the one that stands for it; and no captured layer
may look at its own number, which is the position of its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Module, ModuleList
from transformers import PreTrainedModel

from graft.capture.layer_kinds import NUMBER, LayerKinds

LOOKING = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod"),
    *("pow", "rpow", "neg", "abs", "and", "rand", "or", "ror", "xor", "lshift", "rshift", "index", "int", "float"),
    *("bool", "eq", "ne", "lt", "le", "gt", "ge", "hash", "str", "repr", "format"),
)


class LayerNumber:
    """A layer's own number, which notes how it is looked at; to be handed on is all that it is for."""

    def __init__(self, value: int, note: Callable[[str], None]) -> None:
        self.value, self.note = value, note


def noting(name: str) -> Callable[..., Any]:
    plain = getattr(int, f"__{name}__")

    def method(self: LayerNumber, *args: Any) -> Any:
        self.note(f"it looks at the number of a layer ({name})")
        return plain(self.value, *args)

    return method


for _name in LOOKING:
    setattr(LayerNumber, f"__{_name}__", noting(_name))


@dataclass
class Given:
    """What the captured layers were given besides the hidden states, and gave back. problems: an error within
    torch.export would be told as one of its own."""

    arguments: dict[str, tuple[tuple[Any, ...], Mapping[str, Any]]] = field(default_factory=dict)
    in_tuples: bool = False
    problems: list[str] = field(default_factory=list)

    def note(self, kind: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Any) -> None:
        """Of the layers of a kind the second counts: the first makes what they share."""
        hidden = given[0] if isinstance(given, tuple) and len(given) == 1 else given
        if not isinstance(hidden, torch.Tensor) or not args:
            self.problems.append("its layers give more than the hidden states")
        self.in_tuples = isinstance(given, tuple)
        self.arguments[kind] = args[1:], kwargs


class SkippedLayer(Module):
    """In the place of a layer. What is read from it is the layer's; what it sees is no state of the model."""

    def __init__(self, layer: Module, look: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        vars(self).update(layer=layer, look=look)
        self.train(layer.training)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["look"](args, kwargs)


def looking(kind: str, given: Given) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """What a layer that is left out does with what it is given."""

    def look(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not same(given.arguments.get(kind), (args[1:], kwargs)):
            given.problems.append("layers that are alike are given other values")
        hidden = args[0] if args else None
        return (hidden,) if given.in_tuples else hidden

    return look


def same(one: Any, other: Any) -> bool:
    """One object, or containers of such; plain values by value."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return isinstance(one, (bool, int, float, str)) and one == other


@contextmanager
def only_chosen(model: PreTrainedModel, found: LayerKinds) -> Iterator[list[str]]:
    """The model with the chosen layers alone; gives why what is captured does not hold for the others."""
    owner, _, leaf = found.path.rpartition(".")
    parent, layers = model.get_submodule(owner), model.get_submodule(found.path)
    assert isinstance(layers, ModuleList)
    given = Given()
    chosen = [layers[number] for number in found.chosen]
    numbers = {part: vars(part)[NUMBER] for layer in chosen for part in layer.modules() if is_numbered(part)}
    with ExitStack() as undo:
        undo.callback(lambda: [vars(part).update({NUMBER: number}) for part, number in numbers.items()])
        undo.callback(setattr, parent, leaf, layers)
        for part, number in numbers.items():
            vars(part)[NUMBER] = LayerNumber(number, lambda problem: given.problems.append(problem))
        skipped = (SkippedLayer(layer, looking(kind, given)) for layer, kind in zip(layers, found.kinds, strict=True))
        setattr(parent, leaf, ModuleList(layers[n] if n in found.chosen else one for n, one in enumerate(skipped)))
        for number in found.chosen:
            hook = watch(found.kinds[number], given)
            undo.callback(layers[number].register_forward_hook(hook, with_kwargs=True).remove)
        yield given.problems


def watch(kind: str, given: Given) -> Callable[..., None]:
    def hook(_: Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        given.note(kind, args, kwargs, result)

    return hook


def is_numbered(part: Module) -> bool:
    return type(vars(part).get(NUMBER)) is int
