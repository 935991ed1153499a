"""Which backend lowers a graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch
from torch.fx import GraphModule

from graft.backends.lowered import InductorSettings, Lowered
from graft.base.errors import CacheNotNative, DiskFull, NativeFailed, NoCompiler, UnknownBackend, UsageError
from graft.ir.effects import storage_root, written_args
from graft.ir.nodes import outlives_call, where

NATIVE = (torch.float32, torch.bfloat16, torch.float16)
BACKENDS = ("auto", "eager", "inductor", "cuda_graph", "native")


def check_name(backend: str) -> None:
    if backend not in BACKENDS:
        raise UnknownBackend(backend, BACKENDS)


def decoder_backend(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    formats: Collection[str] = (),
    cache: torch.dtype | None = None,
) -> tuple[str, tuple[str, ...]]:
    """What a decoder of the engine is lowered to, and why, for the report: `auto` is native on a CPU with a compiler.

    It is known before the pipeline, which fuses for the backend. Other modules keep eager as their `auto`: the native
    backend takes the engine's packed tokens alone. formats: of quantized weights; cache: where it is not the model's
    dtype.
    """
    check_name(backend)
    if backend == "cuda_graph":
        raise UsageError(
            "backend='cuda_graph' is for graft.compile: the engine captures its own CUDA graphs, one a batch size,"
            " sampling inside, and would have to do without them; leave out backend, or use 'eager'"
        )
    if backend == "native" and cache is not None:
        raise CacheNotNative
    if backend != "auto":
        return backend, ()
    if device.type != "cpu":
        return "eager", ()
    if cache is not None:
        return "eager", (f"backend: eager, because native kernels have no {cache} key-value cache",)
    if "fp8" in formats:
        return "eager", ("backend: eager, because native kernels have no fp8 weights; int8 and int4 they have",)
    if dtype not in NATIVE:
        return "eager", (f"backend: eager, because native kernels compute in float32 and the weights are {dtype}",)
    from graft.backends.native.compiler import find_compiler

    try:
        compiler = find_compiler()
    except NoCompiler as error:
        return "eager", (f"backend: eager, because {error}",)
    return "native", (f"backend: native, because the model is on the CPU and {compiler[0]} is there",)


def keep_sizes(backend: str, gm: GraphModule) -> str | None:
    """Why sizes that nobody asked for stay numbers on this backend. None: they may be dynamic.

    Inductor takes the offset of a view with dynamic sizes for 0. graft mends that where a custom op writes through
    the view (memory/inductor_fix/offsets.py), and does not bring it about unasked.
    """
    if backend != "inductor":
        return None
    for call, argument in written_args(gm.graph):
        custom = call.target.namespace not in ("aten", "prims", "graft")
        if custom and storage_root(argument) is not argument and outlives_call(storage_root(argument)):
            return (
                f"{where(call)} is a custom op that writes through a view; Inductor mistakes its offset if sizes vary"
            )
    return None


def lower_decoder(
    gm: GraphModule,
    backend: str,
    kernels: Mapping[str, str] | None = None,
    *,
    asked: str = "auto",
    release: Callable[[str], None] | None = None,
) -> Lowered:
    """Lowers what was made for `backend`. Where nobody asked for native by name, eager serves when that fails."""
    try:
        return lower(gm, backend, kernels, release=release)
    except (NativeFailed, DiskFull) as error:
        if asked != "auto":
            raise
        lowered = lower(gm, "eager", kernels)
        note = f"backend: eager on the graph that was fused for native, because {error}"
        return replace(lowered, notes=(note, *lowered.notes))


def lower(
    gm: GraphModule,
    backend: str = "auto",
    kernels: Mapping[str, str] | None = None,
    *,
    reuse_outputs: bool = False,
    release: Callable[[str], None] | None = None,
    inductor: InductorSettings | None = None,
) -> Lowered:
    """`kernels` names the kernel that an op must run; the others get the first that applies.

    `reuse_outputs` lets a CUDA graph return its own result buffers, which the next call overwrites. `release`
    frees a weight of the module's own; the native backend calls it for those that it has packed. `inductor`: what
    is asked of that backend.
    """
    check_name(backend)
    if reuse_outputs and backend != "cuda_graph":
        raise UsageError(f"reuse_outputs is for backend='cuda_graph'; {backend!r} returns new tensors at every call")
    if backend == "cuda_graph":
        from graft.backends.cuda_graph import lower_cuda_graph

        lowered = lower_cuda_graph(gm, kernels, reuse_outputs=reuse_outputs)
    elif backend == "inductor":
        from graft.backends.inductor import lower_inductor

        lowered = lower_inductor(gm, kernels, inductor)
    elif backend == "native":
        from graft.backends.native.lower import lower_native

        lowered = lower_native(gm, kernels, release)
    else:
        from graft.backends.eager import lower_eager

        lowered = lower_eager(gm, kernels or {})
    idle = [op for op in kernels or {} if f"graft::{op}" not in lowered.kernels]
    notes = [f"kernels: the graph has no graft::{op}; it may have become part of a larger op" for op in idle]
    return replace(lowered, notes=(*lowered.notes, *notes))
