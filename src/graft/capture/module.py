"""Any module as a graph, with the length of its caches left free."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.export import Dim
from torch.fx import GraphModule, Node

from graft.base.errors import CaptureError
from graft.capture.cache_layers import is_counter
from graft.capture.containers import CallContainers, Container, plain_containers
from graft.capture.dynamic import (
    Spec,
    apart,
    bound_arguments,
    flat,
    input_names,
    map_specs,
    relaxed,
    spread_call,
    with_dims,
)
from graft.capture.hooks import global_hooks_watched, hooks_inside
from graft.capture.static_cache import HALVES, PREFIX, WithCaches, refuse_new_caches
from graft.ir.nodes import leaves, placeholders, tensor_of
from graft.ir.prefix import drop_prefix
from graft.ir.program.indexing import TensorPositions
from graft.ir.program.signature import SYMBOL, Leaf, Signature, fixed_size, guard_texts, read_signature
from graft.ir.storage import storage_id
from graft.ir.trace import export_graph
from graft.memory.positions import written_dims

LENGTH = 2  # the dim of keys and values, [batch, heads, length, head_dim]


@dataclass(frozen=True)
class CapturedModule:
    """A graph that takes the packed arguments, and what it may be called with."""

    graph_module: GraphModule
    signature: Signature
    returned: tuple[tuple[str, int], ...] | None = None  # where the result held which cache, if it takes any
    notes: tuple[str, ...] = ()
    results: Container | None = None  # how the result is put together, if it holds objects


def capture_module(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any = None,
    *,
    containers: CallContainers | None = None,
    caches: Sequence[Any] = (),
    **settings: Any,
) -> CapturedModule:
    """`capture_plain` for arguments in which objects (`containers`) are taken apart."""
    check = refuse_new_caches if not caches else lambda _: None
    with (
        hooks_inside(module),
        global_hooks_watched(),
        plain_containers(module, containers or CallContainers(), kwargs, check) as taken,
    ):
        captured = capture_plain(module, args, kwargs, dynamic_shapes, caches=caches, **settings)
    return replace(captured, results=taken.template)


def capture_plain(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any = None,
    *,
    caches: Sequence[Any] = (),
    branch: bool = False,
    keep_sizes: Callable[[GraphModule], str | None] = lambda _: None,
) -> CapturedModule:
    """Captures `module` for `args` and `kwargs`, in which `caches` (static_cache.py) are packed.

    `branch`: the program is captured once more because it branches on a size, which may then become static.
    `keep_sizes`: why the backend had better not get sizes of the program dynamic that nobody asked for, or None.
    """
    args, kwargs = apart((args, kwargs))
    specs = spread_call(module, args, kwargs, dynamic_shapes)
    asked_specs = leaf_specs(specs, bound_arguments(module, args, kwargs))
    names = input_names(module, args, kwargs)
    call = CaptureCall(module, args, kwargs, names)
    if caches:
        specs = map_specs(specs, call.bound, counters_free)
        named = specs | next((v for k, v in specs.items() if k not in kwargs and isinstance(v, dict)), {})
        specs = {"args": tuple(specs.values())[: len(args)], "kwargs": {name: named[name] for name in kwargs}}
        call = CaptureCall(WithCaches(module, list(caches)), (args, kwargs), {}, names)
    if branch:
        specs = map_specs(specs, call.bound, lambda _, spec, value: relaxed(spec, value))
    gm, lengths = call.export_free(specs, keep_sizes)
    notes = (*call.notes, *lengths)
    given = flat(args, kwargs)
    signature = read_signature(gm, given, names)
    known = tuple(
        replace(leaf, **call.asked(index, given[index]), counts=bool(caches) and is_counter(leaf.name))
        for index, leaf in enumerate(signature.leaves)
    )
    signature = replace(signature, leaves=known, names=dim_names(asked_specs, known))
    if isinstance(call.module, WithCaches):
        gm = drop_prefix(gm, PREFIX, copy.copy(gm.graph._codegen), type(module).__name__)
        return CapturedModule(gm, signature, call.module.results.returned, notes)
    return CapturedModule(gm, signature, None, notes)


def leaf_specs(specs: Any, bound: Any) -> list[Spec]:
    """The spec of each input, in the order of the graph's."""
    found: list[Spec] = []
    map_specs(specs, bound, lambda _, spec, __: found.append(spec))
    return found


def dim_names(specs: Sequence[Spec], known: Sequence[Leaf]) -> dict[str, str]:
    """Symbol → the name of the Dim that it is for, where the caller gave one."""
    found: dict[str, str] = {}
    for spec, leaf in zip(specs, known, strict=True):
        dims = spec if isinstance(spec, dict) else dict(enumerate(spec)) if isinstance(spec, (list, tuple)) else {}
        for index, dim in dims.items():
            symbol = str(leaf.shape[index]) if leaf.is_tensor and isinstance(dim, Dim) else ""
            if SYMBOL.fullmatch(symbol):  # of a derived Dim it is an expression
                found.setdefault(symbol, dim.__name__)
    return found


def counters_free(name: str, spec: Spec, value: Any) -> Spec:
    """The counters of caches are numbers that change from call to call."""
    free = is_counter(name) and isinstance(value, int) and value not in (0, 1)
    return Dim.AUTO if free else spec


def violates_dims(error: CaptureError) -> bool:
    """Whether torch found guards that named Dims do not allow: by them, a graph is for all sizes of a range."""
    kind = getattr(error.__cause__, "error_type", None)
    return getattr(kind, "name", "") == "CONSTRAINT_VIOLATION"


@dataclass(frozen=True)
class CaptureCall:
    """What is captured, with which arguments."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: list[str]
    notes: list[str] = field(default_factory=list)
    positions: TensorPositions = field(default_factory=TensorPositions)

    @property
    def bound(self) -> dict[str, Any]:
        return bound_arguments(self.module, self.args, self.kwargs)

    def asked(self, index: int, given: Any) -> dict[str, Any]:
        """What the program has asked about how an input lies in memory, and the answers for the example."""
        positions, found = self.positions, {}
        if index in positions.layouts:
            found["contiguous"] = given.is_contiguous()
        if index in positions.strides and not given.is_contiguous():  # else they follow from the sizes
            found["strides"] = given.stride()
        if index in positions.offsets:
            found["offset"] = given.storage_offset()
        return found

    def export(self, specs: Any, freed: Sequence[tuple[int, int]] = ()) -> GraphModule:
        """`freed`: (input, dim) of lengths that graft made dynamic; those that are equal here have to stay equal.

        Otherwise keys and values would have a length each, and attention over them would fit no fused op.
        """
        given = flat(self.args, self.kwargs)
        groups: dict[int, list[tuple[int, int]]] = {}
        for index, dim in freed:
            groups.setdefault(given[index].shape[dim], []).append((index, dim))

        def tie(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            values = flat(args, kwargs)
            found = {storage_id(v): i for i, v in enumerate(values) if isinstance(v, torch.Tensor)}
            self.positions.values = values
            self.positions.inputs = {memory: index for memory, index in found.items() if memory is not None}
            for (first, dim), *others in groups.values():
                for other, dim_at in others:
                    torch._check(values[first].shape[dim] == values[other].shape[dim_at])

        if not any(spec for spec in leaves(specs)):
            specs = None  # torch takes no specs at all for what `**kwargs` takes
        given_call = self.module, self.args, self.kwargs, specs
        hook = self.module.register_forward_pre_hook(tie, with_kwargs=True)
        try:
            return export_graph(*given_call, exact_sizes=True, positions=self.positions)
        except CaptureError as error:
            if torch.__version__ >= "2.12" and not violates_dims(error):
                raise
            # 2.11 cannot slice at a symbolic dim_at so, and a named Dim refuses the guards about 0 and 1;
            # without, those two are outside of what the graph is for, and captured when they are met
            gm = export_graph(*given_call, positions=self.positions)
            why = "torch 2.11 cannot capture it for all sizes"
            if violates_dims(error):
                why = "the program decides by sizes of 0 and 1, which are captured when they are met"
            self.notes[:] = [f"captured for dynamic sizes of 2 and more: {why}"]
            return gm
        finally:
            hook.remove()

    def export_free(
        self, specs: Any, keep_sizes: Callable[[GraphModule], str | None]
    ) -> tuple[GraphModule, tuple[str, ...]]:
        """The graph with the lengths of caller-owned caches dynamic, where the program allows it.

        A cache is known only once there is a graph, so this captures up to three times: as asked; with the lengths
        of the caches it writes free; and, if that fixed a length, with equal sizes of other inputs (masks) free too.
        """
        gm = self.export(specs)
        fixed = self.fixed_by_user(specs)
        wanted = {name: dims for name, dims in self.fixed_lengths(gm).items() if name not in fixed}
        if not wanted:
            return gm, ()
        if (reason := keep_sizes(gm)) is not None:
            return gm, (f"cache lengths are fixed, unless dynamic_shapes frees them: {reason}",)
        sizes = {size for dims in wanted.values() for size in dims.values()}
        for masks_too in (False, True):
            trial = self.try_export(*self.freed(specs, wanted, sizes if masks_too else set()))
            if isinstance(trial, CaptureError):
                return gm, (f"cache lengths are fixed: {str(trial).splitlines()[0]}",)
            left = {name: dims for name, dims in self.fixed_lengths(trial).items() if name in wanted}
            if not left:
                return trial, ()
        # sizes of other inputs were freed in vain, and a length that a guard fixes would only be captured again
        notes = [
            f"the length of {name} (dim {dim}) is fixed at {size}: other sizes of the program depend on it"
            for name, dims in left.items()
            for dim, size in dims.items()
        ]
        return gm, tuple(notes)

    def try_export(self, specs: Any, freed: Sequence[tuple[int, int]]) -> GraphModule | CaptureError:
        try:
            return self.export(specs, freed)
        except CaptureError as error:
            return error

    def fixed_by_user(self, specs: Any) -> set[str]:
        """Inputs for which `dynamic_shapes` says `{}`: every size stays as it is."""
        order, found = iter(self.names), set()

        def look(_: str, spec: Spec, __: Any) -> None:
            name = next(order)
            if spec == {}:
                found.add(name)

        map_specs(specs, self.bound, look)
        return found

    def fixed_lengths(self, gm: GraphModule) -> dict[str, dict[int, int]]:
        """Input → {dim: size} of written caches whose length is a number in the graph."""
        names: dict[Node, str] = dict(zip(placeholders(gm.graph), self.names, strict=True))
        guards = guard_texts(gm)
        found: dict[str, dict[int, int]] = {}
        read = {node: {LENGTH} for node, name in names.items() if self.holds_encoder_keys(name)}
        for owner, dims in {**read, **written_dims(gm)}.items():
            sizes = {dim: fixed_size(tensor_of(owner).shape[dim], guards) for dim in sorted(dims)}
            fixed = {dim: size for dim, size in sizes.items() if size is not None}
            if fixed:
                found[names[owner]] = fixed
        return found

    def holds_encoder_keys(self, name: str) -> bool:
        """Keys and values that one graph writes and all later ones only read; their length is free in both."""
        cross = isinstance(self.module, WithCaches) and f".{HALVES[1]}." in name
        return cross and name.endswith((".keys", ".values"))

    def freed(
        self, specs: Any, wanted: dict[str, dict[int, int]], sizes: set[int]
    ) -> tuple[Any, list[tuple[int, int]]]:
        """`specs` with the wanted dims free, and every dim of one of `sizes` where there is no spec; and which."""
        order = iter(enumerate(self.names))
        dims_at: list[tuple[int, int]] = []

        def free(_: str, spec: Spec, value: Any) -> Spec:
            index, name = next(order)
            if name in wanted and (spec is None or isinstance(spec, dict)):
                dims = [dim for dim in wanted[name] if dim not in (spec or {})]
            elif spec is None and isinstance(value, torch.Tensor):
                dims = [dim for dim, size in enumerate(value.shape) if size in sizes]
            else:
                return spec
            dims_at.extend((index, dim) for dim in dims)
            return with_dims(spec, dims) if dims else spec

        return map_specs(specs, self.bound, free), dims_at
