"""`dynamic_shapes` of torch.export, spelled out for every input, and what graft adds to it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.export import Dim

from graft.base.errors import UnknownInput, UsageError
from graft.ir.nodes import leaves

Spec = Any  # of one input: None, {dim: Dim…}, a sequence of them, or a Dim for a number


def spread(spec: Any, value: Any, name: str = "") -> Any:
    """`spec` in the structure of `value`, so that every input has its own entry."""
    if isinstance(value, dict):
        entries = mapping(spec, name)
        unknown = [key for key, entry in entries.items() if key not in value and entry is not None]
        if unknown:
            asked, *known = (f"{name}.{key}".removeprefix(".") for key in (unknown[0], *value))
            raise UnknownInput(asked, known)
        return {key: spread(entries.get(key), item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        given = spec if isinstance(spec, (list, tuple)) else [mapping(spec, name, none=True)] * len(value)
        if len(given) != len(value):
            raise UsageError(
                f"dynamic_shapes has {len(given)} entries for {name.removeprefix('.')}, which has {len(value)}"
            )
        pairs = enumerate(zip(given, value, strict=True))
        return like(value, [spread(entry, item, f"{name}[{index}]") for index, (entry, item) in pairs])
    return spec


def mapping(spec: Any, name: str, *, none: bool = False) -> Any:
    """The entries for what a container holds, by key; `none`: of a list, which is told by position or not at all."""
    if spec is None or spec == {}:
        return None if none else {}
    if none or not isinstance(spec, Mapping):
        how = "a list, with one for each item" if none else "a dict, with one for each key"
        raise UsageError(
            f"the entry of dynamic_shapes for {name.removeprefix('.') or 'the call'} is {spec!r:.60}; it holds"
            f" several inputs, so give {how}"
        )
    return spec


def like(value: Any, items: list[Any]) -> Any:
    """`items` in a container of the kind of `value`; a named tuple takes them one by one, a torch.Size numbers."""
    if isinstance(value, torch.Size) and not all(isinstance(item, (int, torch.SymInt)) for item in items):
        return tuple(items)
    return value._make(items) if hasattr(value, "_make") else type(value)(items)


def structure(value: Any) -> Any:
    """How inputs are nested, as JSON holds it: None for one input."""
    if isinstance(value, dict):
        return {"dict": {key: structure(item) for key, item in value.items()}}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [structure(item) for item in value]}
    return None


def key_orders(value: Any, name: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The keys of every dict among the inputs, which a program may go through in the order that they have."""
    if isinstance(value, dict):
        yield name, tuple(value)
        for key, item in value.items():
            yield from key_orders(item, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from key_orders(item, f"{name}[{index}]")


def conform(value: Any, known: Any, name: str, *, by_key: bool = False) -> Any:
    """`value`, with the keys of its dicts in the order of `known` if `by_key`; raises UsageError where it is nested
    otherwise."""
    if known is None:
        if isinstance(value, (list, tuple, dict)):
            raise UsageError(f"input {name} is a {type(value).__name__}, but was one value when it was compiled")
        return value
    ((kind, parts),) = known.items()
    if kind == "dict":
        if not isinstance(value, dict) or value.keys() != parts.keys():
            given = list(value) if isinstance(value, dict) else type(value).__name__
            raise UsageError(f"input {name} was a dict of {list(parts)} when it was compiled, and is {given}")
        order = parts if by_key else value
        return {key: conform(value[key], parts[key], f"{name}.{key}", by_key=by_key) for key in order}
    if type(value).__name__ != kind or len(value) != len(parts):
        raise UsageError(f"input {name} was a {kind} of {len(parts)} when it was compiled, and is {value!r:.60}")
    pairs = enumerate(zip(value, parts, strict=True))
    return like(value, [conform(item, part, f"{name}[{i}]", by_key=by_key) for i, (item, part) in pairs])


def bound_arguments(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by parameter of `module.forward`."""
    return dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)


def spread_call(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> dict[str, Any]:
    """The specs by parameter of `module.forward`, as torch.export wants them."""
    bound = bound_arguments(module, args, kwargs)
    if isinstance(dynamic_shapes, (list, tuple)):
        if len(dynamic_shapes) != len(bound):
            raise UsageError(f"dynamic_shapes has {len(dynamic_shapes)} entries, and the call {len(bound)} inputs")
        dynamic_shapes = dict(zip(bound, dynamic_shapes, strict=True))
    return spread(dynamic_shapes or {}, bound)


def map_specs(specs: Any, value: Any, change: Callable[[str, Spec, Any], Spec], name: str = "") -> Any:
    """Every input's spec through `change(name, spec, value)`; `specs` has the structure of `value`."""
    if isinstance(value, dict):
        return {key: map_specs(specs[key], item, change, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        pairs = enumerate(zip(specs, value, strict=True))
        return like(value, [map_specs(spec, item, change, f"{name}[{i}]") for i, (spec, item) in pairs])
    return change(name.removeprefix("."), specs, value)


def relaxed(spec: Spec, value: Any) -> Spec:
    """The spec with every dim free to become static, as a program that branches on a size makes it.

    0 and 1 are static at once: the branches that there are on sizes are nearly all on those.
    """
    if spec is None or isinstance(spec, int):
        return spec
    if not isinstance(value, torch.Tensor):
        return None if value in (0, 1) else Dim.AUTO
    dims = spec if isinstance(spec, dict) else dict(enumerate(spec))
    return {
        dim: Dim.STATIC if value.shape[dim] in (0, 1) else Dim.AUTO(**limits(entry))
        for dim, entry in dims.items()
        if entry is not None
    }


def limits(entry: Any) -> dict[str, int | None]:
    """The range that a Dim is for, as Dim.AUTO takes it; none for a plain number."""
    low, high = getattr(entry, "min", None), getattr(entry, "max", None)
    return {"min": low if isinstance(low, int) else None, "max": high if isinstance(high, int) else None}


def with_dims(spec: Spec, dims: Sequence[int]) -> Spec:
    """The spec with more dims free."""
    return {**(spec or {}), **dict.fromkeys(dims, Dim.AUTO)}


def input_names(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """`cache`, `caches[0]`, `state.k`: the inputs as the user wrote them, in the order of the graph's."""
    positional: list[str] = []
    for parameter, value in bound_arguments(module, args, kwargs).items():
        if inspect.signature(module.forward).parameters[parameter].kind is inspect.Parameter.VAR_POSITIONAL:
            positional += [f"{parameter}[{index}]" for index in range(len(value))]
        else:
            positional.append(parameter)
    named = dict(zip(positional, args, strict=False)) | kwargs
    found: list[str] = []
    map_specs(named, named, lambda name, _, __: found.append(name))
    return found


def in_order(module: torch.nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments in the order of the signature; what `**kwargs` takes comes after them."""
    known = [name for name in inspect.signature(module.forward).parameters if name in kwargs]
    return {name: kwargs[name] for name in (*known, *(n for n in kwargs if n not in known))}


def apart(value: Any) -> Any:
    """Examples in which no tensor comes twice: torch.export would take two inputs for one."""
    seen: set[int] = set()

    def once(_: str, __: Any, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            item = item.clone() if id(item) in seen else item
            seen.add(id(item))
        return item

    return map_specs(value, value, once)


def flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The inputs in the order of the graph's."""
    values = [*args, *kwargs.values()]
    return list(leaves(values)) if any(isinstance(value, (list, tuple, dict)) for value in values) else values
