"""How the arguments of a compiled module are given: by position or name, and nested how."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import starmap
from typing import Any, NamedTuple

import torch

from graft.base.errors import UsageError
from graft.capture.containers import CallContainers
from graft.capture.dynamic import conform, flat, key_orders, like, structure
from graft.ir.io.literals import decode_literal, encode_literal
from graft.ir.program.identity import line_that_compares
from graft.ir.program.signature import Leaf

KeyOrders = tuple[tuple[str, tuple[Any, ...]], ...]  # of each dict among the arguments: its name and its keys
KEYWORDS = "the keyword arguments"  # that `**kwargs` takes
NO_CONTAINERS: Mapping[str, Any] = {"args": (), "kwargs": {}}  # of modules that were saved before there were any
MOST_KINDS = 1024  # combinations of kinds of inputs that are remembered
PLAIN = (type(None), bool, int, float, str)


def kind(value: Any) -> Any:
    """All of an input that decides which graph is right for it."""
    if isinstance(value, torch.Tensor):
        strided = value.layout is torch.strided
        lies = (value.is_contiguous() or value.stride()) if strided else value.layout
        return value.dtype, value.device, value.shape, lies
    return type(value), repr(value) if isinstance(value, float) else value


def calls_of(calls: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """What `warm` is given, as arguments and keyword arguments."""
    listed = isinstance(calls, Sequence) and not isinstance(calls, str)
    wrong = calls if not listed else next((c for c in calls if not isinstance(c, (tuple, list, Mapping))), None)
    if wrong is not None or not listed:
        raise UsageError(
            "warm takes a list of calls, each a tuple of arguments or a dict of keyword arguments, as in"
            f" compiled.warm([(x,)]); it was given {'a call that is ' * listed}a {type(wrong).__name__}"
        )
    return [((), dict(call)) if isinstance(call, Mapping) else (tuple(call), {}) for call in calls]


def example(leaf: Leaf | None, value: Any) -> Any:
    """A tensor of such sizes, where the input is one tensor."""
    sizes = isinstance(value, (tuple, list)) and all(type(size) is int for size in value)
    if leaf is None or leaf.dtype is None or not sizes:
        return value
    if any(size < 0 for size in value):
        raise UsageError(f"the sizes {tuple(value)} of {leaf.name} are those of no tensor")
    return torch.zeros(value, dtype=getattr(torch, leaf.dtype.removeprefix("torch.")), device=leaf.device)


def order_text(given: KeyOrders, known: KeyOrders) -> str:
    """What is against a graph that was captured for keys in the order `known`."""
    name, keys = next((one for one, other in zip(given, known, strict=False) if one != other), given[0])
    where = name if name.startswith("the ") else f"the keys of {name}"
    return f"{where} are in another order: {', '.join(map(repr, keys))}"


def values_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    return (*args, *kwargs.values())


class GivenCall(NamedTuple):
    """The arguments of a call, in the form that the graph takes."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: list[Any]  # flat
    orders: KeyOrders


def keeps_order(value: Any, nesting: Any) -> bool:
    """Whether the keys of its dicts have the order that they had; most calls have, and are looked at first."""
    if nesting is None:
        return True
    ((kind, parts),) = nesting.items()
    if kind == "dict":
        same = list(value) == list(parts)
        return same and all(keeps_order(value[key], part) for key, part in parts.items() if part is not None)
    return all(keeps_order(item, part) for item, part in zip(value, parts, strict=True) if part is not None)


def with_keys(value: Any, name: str, orders: Mapping[str, tuple[Any, ...]]) -> Any:
    if isinstance(value, dict):
        return {key: with_keys(value[key], f"{name}.{key}", orders) for key in orders.get(name, tuple(value))}
    if isinstance(value, (list, tuple)):
        return like(value, [with_keys(item, f"{name}[{index}]", orders) for index, item in enumerate(value)])
    return value


def example_of_nesting(nesting: Any) -> Any:
    """Dicts and lists as they are nested, with None in place of the inputs."""
    if nesting is None:
        return None
    ((kind, parts),) = nesting.items()
    if kind == "dict":
        return {key: example_of_nesting(part) for key, part in parts.items()}
    return [example_of_nesting(part) for part in parts]


def has_dict(nesting: Any) -> bool:
    if nesting is None:
        return False
    ((kind, parts),) = nesting.items()
    return kind == "dict" or any(map(has_dict, parts))


def orders_data(orders: KeyOrders) -> list[Any]:
    return [[name, [encode_literal(key) for key in keys]] for name, keys in orders]


def orders_from_data(data: Sequence[Any]) -> KeyOrders:
    return tuple((name, tuple(decode_literal(key) for key in keys)) for name, keys in data)


def nesting_data(nesting: Any) -> Any:
    """As JSON holds it, whose objects have no keys but texts: a dict is a list of pairs."""
    if nesting is None:
        return None
    ((kind, parts),) = nesting.items()
    if kind == "dict":
        return {kind: [[encode_literal(key), nesting_data(part)] for key, part in parts.items()]}
    return {kind: [nesting_data(part) for part in parts]}


def nesting_from_data(data: Any) -> Any:
    if data is None:
        return None
    ((kind, parts),) = data.items()
    if kind == "dict":
        pairs = parts.items() if isinstance(parts, dict) else parts  # of modules that were saved when keys were texts
        return {kind: {decode_literal(key): nesting_from_data(part) for key, part in pairs}}
    return {kind: [nesting_from_data(part) for part in parts]}


@dataclass(frozen=True)
class CallForm:
    """The form that the graph takes. Calls in another form are brought into it, or refused."""

    positional: int
    keywords: tuple[str, ...]
    parameters: tuple[str, ...] = ()  # what forward takes by position
    defaults: Mapping[str, Any] = field(default_factory=dict)
    nesting: tuple[Any, ...] = ()  # of each argument; None for one value
    containers: CallContainers = field(default_factory=CallContainers)  # objects among the arguments
    extra: tuple[str, ...] = ()  # of the keywords those that `**kwargs` takes
    by_key: bool = False  # the order of keys is of no matter: a graph was captured before
    compares: str = ""  # the line at which the program compares objects by `is`

    @staticmethod
    def of(
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        containers: CallContainers | None = None,
        *,
        by_key: bool = False,
    ) -> CallForm:
        """`args` and `kwargs` hold plain containers, into which `containers` are taken apart."""
        known = inspect.signature(module.forward).parameters.values()
        ordered = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = tuple(p.name for p in known if p.kind in ordered)
        defaults = {p.name: p.default for p in known if isinstance(p.default, PLAIN)}
        nesting = tuple(map(structure, values_of(args, kwargs)))
        named = {p.name for p in known if p.kind is not inspect.Parameter.VAR_KEYWORD}
        extra = () if by_key else tuple(name for name in kwargs if name not in named)
        objects = containers or CallContainers()
        compares = "" if by_key else line_that_compares(module)
        return CallForm(len(args), tuple(kwargs), parameters, defaults, nesting, objects, extra, by_key, compares)

    def takes(self, name: str) -> bool:
        """Whether the program has an argument of this name."""
        return name in self.parameters or name in self.keywords

    def apply(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same arguments in this form; raises UsageError for others."""
        if len(args) != self.positional or tuple(kwargs) != self.keywords:
            args, kwargs = self.rearranged(args, kwargs)
        if self.containers:
            args, kwargs = self.containers.take_apart(args, kwargs)
        values = values_of(args, kwargs)
        if any(self.nesting) or any(isinstance(value, (list, tuple, dict)) for value in values):
            nesting = (*self.nesting[: len(args)], *(self.nesting[len(args) + i] for i in self.places(kwargs)))
            entries = zip(values, nesting, self.names(args, kwargs), strict=True)
            fitted = [conform(*entry, by_key=self.by_key) for entry in entries]
            return tuple(fitted[: len(args)]), dict(zip(kwargs, fitted[len(args) :], strict=True))
        return args, kwargs

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GivenCall:
        """The call in this form; raises UsageError for others."""
        args, kwargs = self.apply(args, kwargs)
        return GivenCall(args, kwargs, flat(args, kwargs), self.key_orders(args, kwargs))

    def examples(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: Sequence[Leaf]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call with a tensor in place of sizes that stand for one."""
        tensors = {leaf.name: leaf for leaf in leaves if leaf.is_tensor}
        pairs = [(tensors.get(name), value) for name, value in zip(self.names(args, {}), args, strict=True)]
        return tuple(starmap(example, pairs)), {
            name: example(tensors.get(name), value) for name, value in kwargs.items()
        }

    def names(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
        """Of the arguments, in this form."""
        first, unnamed = self.parameters[: len(args)], range(len(self.parameters), len(args))
        return (*first, *map(str, unnamed), *kwargs)

    def places(self, kwargs: Mapping[str, Any]) -> Iterator[int]:
        """Where the keywords of a call stand among those of the form."""
        return map(self.keywords.index, kwargs)

    @cached_property
    def ordered(self) -> bool:
        """Whether a program could see in which order keys were given."""
        return not self.by_key and (len(self.extra) > 1 or any(map(has_dict, self.nesting)))

    def key_orders(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> KeyOrders:
        """Of arguments in this form, in which order each dict has its keys; nothing where there are none."""
        if not self.ordered:
            return ()
        if tuple(kwargs) == self.keywords and all(map(keeps_order, values_of(args, kwargs), self.nesting)):
            return self.first_orders
        return self.orders_of(args, kwargs)

    def orders_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> KeyOrders:
        own = ((KEYWORDS, tuple(name for name in kwargs if name in self.extra)),)
        pairs = zip(values_of(args, kwargs), self.names(args, kwargs), strict=True)
        return (*own[: len(self.extra) > 1], *(found for pair in pairs for found in key_orders(*pair)))

    @cached_property
    def first_orders(self) -> KeyOrders:
        """Those of the call that it was compiled for."""
        made = list(map(example_of_nesting, self.nesting))
        kwargs = dict(zip(self.keywords, made[self.positional :], strict=True))
        return self.orders_of(tuple(made[: self.positional]), kwargs)

    def in_order(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], orders: KeyOrders
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same arguments, with their keys in that order."""
        wanted = dict(orders)
        extra = wanted.get(KEYWORDS, tuple(name for name in kwargs if name in self.extra))
        kwargs = {**{n: v for n, v in kwargs.items() if n not in self.extra}, **{n: kwargs[n] for n in extra}}
        pairs = zip(values_of(args, kwargs), self.names(args, kwargs), strict=True)
        fitted = [with_keys(value, name, wanted) for value, name in pairs]
        return tuple(fitted[: len(args)]), dict(zip(kwargs, fitted[len(args) :], strict=True))

    def rearranged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        first = self.parameters[: self.positional]
        if len(args) > len(self.parameters) or len(first) < self.positional:  # `*args`: only their number counts
            first = ()
            given = dict(kwargs)
            if len(args) != self.positional:
                raise UsageError(f"compiled with {self.positional} inputs, called with {len(args)}")
        else:
            given = dict(zip(self.parameters, args, strict=False)) | kwargs
        wanted = (*first, *self.keywords)
        unasked = [n for n in given if n not in wanted and not self.is_default(n, given[n])]
        given |= {name: self.defaults[name] for name in wanted if name not in given and name in self.defaults}
        missing = [name for name in wanted if name not in given]
        if unasked or missing:
            if not kwargs and not self.keywords:
                raise UsageError(f"compiled with {self.positional} inputs, called with {len(args)}")
            raise UsageError(
                f"compiled with {self.positional} inputs and the keyword arguments {list(self.keywords)},"
                f" called with {len(args)} and {list(kwargs)}"
            )
        placed = tuple(given[name] for name in first) if first or not self.positional else args
        named = [name for name in self.keywords if name not in self.extra]
        return placed, {name: given[name] for name in (*named, *(n for n in given if n in self.extra))}

    def is_default(self, name: str, value: Any) -> bool:
        return name in self.defaults and type(value) is type(self.defaults[name]) and value == self.defaults[name]

    def to_data(self) -> dict[str, Any]:
        plain = asdict(replace(self, containers=CallContainers(), nesting=()))
        return plain | {"nesting": [nesting_data(n) for n in self.nesting], "containers": self.containers.to_data()}

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> CallForm:
        lists: dict[str, Any] = {name: tuple(data.get(name, ())) for name in ("keywords", "parameters", "extra")}
        lists["by_key"] = data.get("by_key", True)  # so it was when modules were saved without
        lists["nesting"] = tuple(map(nesting_from_data, data["nesting"]))
        lists["compares"] = data.get("compares", "")
        containers = CallContainers.from_data(data.get("containers", NO_CONTAINERS))
        return CallForm(data["positional"], defaults=data["defaults"], containers=containers, **lists)
