"""State that a forward assigns anew (`self.state = …`), as writes into the memory that it has; other is refused.

torch.export (2.11, 2.13, non-strict) does this for the buffers of the module that it is given and forgets assignments
in submodules; it swaps two buffers by two copies one after the other, and a returned view of the old buffer shows the
new one. Plain tensor attributes, numbers, containers and objects keep for good what the trace put there, or lose it.

    before:  self.b = y                     after:  %y; %old = clone(%b); copy_(%b, %y)
             return self_b_before[1]                return %old[1]

Here every trace ends with all of it as it was, also one that raises. What changed in between is

- a buffer or a tensor attribute of a module, replaced by one of its shape, dtype and device: a write in place;
- an equal number, string or container of such, or an attribute that holds neither tensors nor numbers: nothing;
- a list of the module's own parameters, made anew of those that the trace has in their place (as `nn.LSTM` keeps
  them): nothing;
- a new attribute that is a bool, as Hugging Face's for hooks that are installed once: nothing;
- the shape, the strides or the memory of an argument or of state that is the same object still: CaptureError
  (layouts.py);
- anything else, such as a counter, a list that grows, or a container among the arguments: CaptureError. Also a number
  that is set and never read: nothing tells it from a counter.

Objects are looked into through their `__dict__`; not those of torch and the standard library, nor configurations.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graft.base.errors import CaptureError
from graft.ir.program.assigned_weights import OWN_TENSOR, AssignedWeights, Key
from graft.ir.program.layouts import Layouts
from graft.ir.snapshot import MISSING, ModuleSnapshot, SavedContainer, describe
from graft.ir.storage import share_storage, storage_id


@contextmanager
def assignments_as_writes(module: torch.nn.Module) -> Iterator[None]:
    """Within it, `module.forward` writes assigned tensors back at its end, so that a trace has the writes."""
    forward = module.forward
    real = tensors(module)  # a trace has fake tensors for buffers, which do not tell whose memory is shared
    parameters = dict(module.named_parameters(remove_duplicate=False))
    weights = {storage_id(parameter): path for path, parameter in module.named_parameters()}
    around = ModuleSnapshot()  # torch.export puts copies of lists and dicts in the place of the module's own
    around.add_module(module)

    @functools.wraps(forward)
    def written(*args: Any, **kwargs: Any) -> Any:
        state, given = ModuleSnapshot(), ModuleSnapshot()
        state.add_module(module)
        names = argument_names(forward, args, kwargs)
        for name, value in names.items():
            given.add(name, value)
        layouts = Layouts.of(names, module)
        try:
            result = forward(*args, **kwargs)
            layouts.refuse_changes()
            traced = dict(module.named_parameters(remove_duplicate=False))
            twins: dict[int, Tensor] = {id(p): traced.get(path, p) for path, p in parameters.items()}
            old, new = assigned(state, real, weights, twins)
            refuse_changed_arguments(given)
            return write_back(result, old, new) if old else result
        finally:
            state.put_back()
            given.put_back()

    module.forward = written  # type: ignore[method-assign]
    try:
        yield
    finally:
        around.put_back()


def tensors(module: torch.nn.Module) -> dict[Key, Tensor]:
    """Buffers and plain tensor attributes, of all submodules."""
    return {
        (m, name): value
        for m in module.modules()
        for name, value in {**vars(m), **m._buffers}.items()
        if isinstance(value, Tensor)
    }


def argument_names(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    try:
        return dict(inspect.signature(forward).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # wrong arguments, which the call itself will say; or no signature
        return {f"args[{index}]": value for index, value in enumerate(args)} | kwargs


def assigned(
    state: ModuleSnapshot, real: dict[Key, Tensor], weights: dict[int | None, str], twins: dict[int, Tensor]
) -> tuple[dict[Key, Tensor], dict[Key, Tensor]]:
    """Old and new values of the tensors that were assigned. Raises CaptureError for any other change.

    twins: what the trace has in the place of each parameter, by its id.
    """
    old: dict[Key, Tensor] = {}
    new: dict[Key, Tensor] = {}
    tied: dict[Key, str] = {}
    refuse_changes(ModuleSnapshot([container for container in state.containers if not may_be_written(container)]))
    for container in filter(may_be_written, state.containers):
        owner = container.owner
        assert owner is not None
        for name, before, now in container.changes():
            if not isinstance(before, Tensor):
                if traced_weights(before, now, twins):
                    continue
                refuse(f"{container.path}{name}", now)
            refuse_unequal(f"{container.path}{name}", before, now, container.items is owner._buffers)
            refuse_tied(f"{container.path}{name}", (owner, name), real)
            if (owner, name) in real and (memory := storage_id(real[owner, name])) in weights:
                tied[owner, name] = f"{container.path}{name}, which shares its memory with {weights[memory]}"
            old[owner, name], new[owner, name] = before, now
    if tied:
        raise AssignedWeights(tied)
    return old, new


def traced_weights(before: Any, now: Any, twins: dict[int, Tensor]) -> bool:
    """Whether both list the same parameters: those of the module, and those that a trace has in their place."""
    if not (isinstance(before, (list, tuple)) and type(before) is type(now) and len(before) == len(now)):
        return False
    return all(b is n or twins.get(id(b)) is n for b, n in zip(before, now, strict=True))


def may_be_written(container: SavedContainer) -> bool:
    owner = container.owner
    return owner is not None and (container.items is owner._buffers or container.items is vars(owner))


def refuse_changes(snapshot: ModuleSnapshot, verb: str = "sets", advice: str | None = None) -> None:
    for container in snapshot.containers:
        if container.refused:
            for key, _, now in container.changes():
                dotted = container.path.endswith(".") or not container.path or container.owner is not None
                refuse(f"{container.path}{key}" if dotted else f"{container.path}[{key!r}]", now, verb, advice)


def refuse_changed_arguments(given: ModuleSnapshot) -> None:
    """Also a dict of which only the order is another: the caller's would keep its own."""
    refuse_changes(given, "changes the argument", "return the new values instead")
    for one in given.containers:
        if (
            isinstance(one.items, dict)
            and one.refused
            and not one.path.endswith(".")
            and [*one.items] != [*one.saved]
        ):
            raise CaptureError(
                f"forward changes the order of keys in the argument {one.path}: a graph cannot keep it; use a copy"
            )


def refuse(path: str, now: Any, verb: str = "sets", advice: str | None = None) -> None:
    advice = advice or "make it a registered buffer (a tensor) and write into it"
    raise CaptureError(f"forward {verb} {path} ({describe(now)}): a graph cannot keep it; {advice}")


def write_back(result: Any, old: dict[Key, Tensor], new: dict[Key, Tensor]) -> Any:
    """Copies each new value into the old tensor. What was read from an old tensor, and is needed later, is copied."""
    saved: dict[Key, Tensor] = {}
    # A plain attribute stays a real tensor in a trace and its views are fake ones: another storage than its own.
    owners = list(old.items()) + [(key, same_view(t, t)) for key, t in old.items() if key[1] not in key[0]._buffers]

    def apart(value: Any) -> Any:
        """The same view, of a copy of the old tensor's memory."""
        found = next(((k, b) for k, b in owners if isinstance(value, Tensor) and share_storage(b, value)), None)
        if found is None:
            return value
        key, owner = found
        if key not in saved:
            size = owner.untyped_storage().nbytes() // owner.element_size()
            saved[key] = owner.as_strided((size,), (1,), 0).clone()
        return same_view(saved[key], value)

    result = pytree.tree_map(apart, result)
    sources = {key: apart(value) for key, value in new.items()}
    for (owner, name), tensor in old.items():
        tensor.copy_(sources[owner, name])
        setattr(owner, name, tensor)  # torch's own hook then adds a copy of it onto itself, which is dropped
    return result


def same_view(memory: Tensor, value: Tensor) -> Tensor:
    return memory.as_strided(value.shape, value.stride(), value.storage_offset())


def refuse_unequal(path: str, old: Tensor, new: Any, is_buffer: bool) -> None:
    """Raises CaptureError for an assignment that a write into the tensor's memory cannot stand for."""
    kind = "buffer" if is_buffer else "tensor"
    if new is None or new is MISSING:
        raise CaptureError(f"forward takes away the {kind} {path}; keep it and write into it")
    if not isinstance(new, Tensor):
        refuse(path, new)
    if (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
        raise CaptureError(
            f"forward assigns {new.dtype} {tuple(new.shape)} on {new.device} to the {kind} {path}, which is"
            f" {old.dtype} {tuple(old.shape)} on {old.device}; a {kind} keeps its shape, dtype and device"
        )


def refuse_tied(path: str, key: Key, real: dict[Key, Tensor]) -> None:
    tied = next((k for k, b in real.items() if k != key and share_storage(b, real[key])), None)
    if tied is not None:
        raise CaptureError(
            f"forward assigns {path}, which shares its memory with another tensor of the module ({tied[1]});"
            f" {OWN_TENSOR}"
        )
