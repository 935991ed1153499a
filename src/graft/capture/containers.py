"""Objects that hold tensors: dataclasses, named tuples and mappings of other classes, taken apart and put together.

    forward(batch: Batch) -> Out(logits, state)      →   forward(batch: {"ids": …, "mask": …}) -> {"logits": …, …}

A graph takes and returns plain dicts, lists and tuples. While a program is traced, its forward gets objects that are
rebuilt from those, and what it returns is taken apart; calls of the compiled module do the same around the graph.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graft.base.errors import DumpError, UsageError
from graft.ir.program.assignments import refuse_changed_arguments
from graft.ir.snapshot import ModuleSnapshot, Noted

PLAIN = (dict, OrderedDict, defaultdict, list, tuple, torch.Size)


@dataclass(frozen=True)
class Container:
    """What a value is made of: a class of the user's, or a plain container that holds one somewhere."""

    cls: type
    parts: Mapping[Any, Container | None]  # None: nothing in it is an object of a class of the user's

    @property
    def foreign(self) -> bool:
        return self.cls not in PLAIN

    def to_data(self) -> dict[str, Any]:
        module, name = self.cls.__module__, self.cls.__qualname__
        if find_class(module, name) is not self.cls:
            raise DumpError(
                f"{name} cannot be found by its name in {module}, where another process would look for it; define it"
                " at the top of its file"
            )
        parts = [[key, part and part.to_data()] for key, part in self.parts.items()]
        return {"class": [module, name], "parts": parts}

    @staticmethod
    def from_data(data: Mapping[str, Any] | None) -> Container | None:
        if data is None:
            return None
        module, name = data["class"]
        found = find_class(module, name)
        if found is None:
            raise DumpError(f"it takes or returns a {name} of {module}; import that module before loading")
        return Container(found, {key: Container.from_data(part) for key, part in data["parts"]})


def fits(known: Container | None, given: Container | None) -> bool:
    """Whether objects are of the classes that a graph was captured for; an OrderedDict will do for a dict."""
    if known is None:
        plain = given is not None and given.cls is OrderedDict
        return given is None or (plain and all(fits(None, part) for part in given.parts.values()))
    same = given is not None and known.cls is given.cls and known.parts.keys() == given.parts.keys()
    return same and all(fits(part, given.parts[key]) for key, part in known.parts.items())


def find_class(module: str, name: str) -> type | None:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None


def parts_of(value: Any, results: bool) -> dict[Any, Any] | None:
    """What `value` holds, by key; None for what is a leaf, or for a result that torch takes apart itself."""
    kind = type(value)
    if isinstance(value, torch.Tensor) or (results and kind in pytree.SUPPORTED_NODES and kind not in PLAIN):
        return None
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if isinstance(value, (dict, UserDict)):
        return dict(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [entry.name for entry in dataclasses.fields(value)]
        if not hasattr(value, "__dict__"):
            return {name: getattr(value, name) for name in names}
        own = vars(value)
        return {name: own[name] for name in names if name in own} | own
    return None


def take_apart(value: Any, *, results: bool = False) -> tuple[Any, Container | None]:
    """`value` as plain containers, and how to put it together; None where it is plain already."""
    parts = parts_of(value, results)
    if parts is None:
        return value, None
    taken = {key: take_apart(part, results=results) for key, part in parts.items()}
    template = Container(type(value), {key: part for key, (_, part) in taken.items()})
    # of a Size a graph makes a tuple, and torch.export a dict of what forward takes as an OrderedDict
    foreign = template.foreign or template.cls is (torch.Size if results else OrderedDict)
    if not foreign and not any(template.parts.values()):
        return value, None
    items = {key: part for key, (part, _) in taken.items()}
    if not foreign:
        return rebuilt(template.cls, items), template
    return (tuple(items.values()) if isinstance(value, tuple) else items), template


def put_together(value: Any, template: Container | None) -> Any:
    if template is None:
        return value
    keys = value if isinstance(value, dict) else range(len(value))
    return rebuilt(template.cls, {key: put_together(value[key], template.parts[key]) for key in keys})


def rebuilt(cls: Any, items: Mapping[Any, Any]) -> Any:
    if issubclass(cls, (list, tuple)):
        return cls._make(items.values()) if hasattr(cls, "_make") else cls(items.values())
    if issubclass(cls, (dict, UserDict)):
        return cls(**items) if dataclasses.is_dataclass(cls) else cls(items)
    made = object.__new__(cls)
    for name, item in items.items():
        object.__setattr__(made, name, item)  # also of a frozen one; its __init__ ran when the caller made it
    return made


@dataclass(frozen=True)
class CallContainers:
    """Of the arguments of a call, by position and by keyword."""

    args: tuple[Container | None, ...] = ()
    kwargs: Mapping[str, Container | None] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(self.args) or any(self.kwargs.values())

    def to_data(self) -> dict[str, Any]:
        named = {name: part and part.to_data() for name, part in self.kwargs.items()}
        return {"args": [part and part.to_data() for part in self.args], "kwargs": named}

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> CallContainers:
        named = {name: Container.from_data(part) for name, part in data["kwargs"].items()}
        return CallContainers(tuple(map(Container.from_data, data["args"])), named)

    def take_apart(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call of this kind; raises UsageError where an argument is of another class, or holds other things."""
        args, kwargs, found = take_call_apart(args, kwargs)
        pairs = [(f"argument {i}", *both) for i, both in enumerate(zip(self.args, found.args, strict=True))]
        pairs += [(f"argument {name}", known, found.kwargs[name]) for name, known in self.kwargs.items()]
        for name, known, given in pairs:
            if not fits(known, given):
                was, now = (part.cls.__name__ if part else "plain" for part in (known, given))
                other = f"a {now} that holds other things" if was == now else f"a {now}"
                raise UsageError(f"{name} was a {was} when it was compiled, and is {other}")
        return args, kwargs

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any, Container | None]]:
        """The name and the value of each argument, with what it is taken apart into."""
        yield from ((f"[{i}]", value, part) for i, (value, part) in enumerate(zip(args, self.args, strict=True)))
        yield from ((name, value, self.kwargs[name]) for name, value in kwargs.items())

    def put_together(self, args: Any, kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = tuple(put_together(value, part) for value, part in zip(args, self.args, strict=True))
        return given, {name: put_together(value, self.kwargs[name]) for name, value in kwargs.items()}


def take_call_apart(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], CallContainers]:
    taken, named = [take_apart(value) for value in args], {name: take_apart(value) for name, value in kwargs.items()}
    containers = CallContainers(tuple(c for _, c in taken), {name: c for name, (_, c) in named.items()})
    return tuple(value for value, _ in taken), {name: value for name, (value, _) in named.items()}, containers


@dataclass
class TakenResults(Noted):
    """How the result of the program is put together, once it ran."""

    template: Container | None = None


@contextmanager
def plain_containers(
    module: torch.nn.Module,
    containers: CallContainers,
    kwargs: Mapping[str, Any],
    check: Callable[[Any], None] = lambda _: None,
) -> Iterator[TakenResults]:
    """Within it, `module.forward` takes and returns plain containers, and has a name for each of `kwargs`.

    `check` sees the result as the program returns it.
    """
    forward, own, taken = module.forward, "forward" in vars(module), TakenResults()

    @functools.wraps(forward)
    def plain(*args: Any, **kwargs: Any) -> Any:
        snapshot = ModuleSnapshot()
        if containers:
            args, kwargs = containers.put_together(args, kwargs)
            for name, value, part in containers.named(args, kwargs):
                if part is not None:  # caches among the others are written on purpose
                    snapshot.add(name, value)
        result = forward(*args, **kwargs)
        check(result)
        result, taken.template = take_apart(result, results=True)
        refuse_changed_arguments(snapshot)
        return result

    plain.__signature__ = named_signature(forward, kwargs)  # pyrefly: ignore
    module.forward = plain  # type: ignore[method-assign]
    try:
        yield taken
    finally:
        if own:
            module.forward = forward
        else:
            del module.forward


def shapes_by_name(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic_shapes: Any
) -> Any:
    """A list of `dynamic_shapes` as a dict: the keywords of a later call may come in another order."""
    if not isinstance(dynamic_shapes, (list, tuple)):
        return dynamic_shapes
    names = list(named_signature(module.forward, kwargs).bind(*args, **kwargs).arguments)
    return dict(zip(names, dynamic_shapes, strict=True)) if len(names) == len(dynamic_shapes) else dynamic_shapes


def named_signature(forward: Any, kwargs: Mapping[str, Any]) -> inspect.Signature:
    """The signature with a parameter for each keyword that `**kwargs` takes: torch gives sizes to names alone."""
    signature = inspect.signature(forward)
    known = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    if len(known) == len(signature.parameters):
        return signature
    names = {p.name for p in known}
    extra = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in kwargs if name not in names]
    return signature.replace(parameters=[*known, *extra])
