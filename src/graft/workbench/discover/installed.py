"""Ops that other packages registered with torch, each as a function of tensors and numbers that can be tried on a
piece: flashinfer, liger, torchao, vllm and whatever else was imported."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from graft.ir.nodes import OpOverload
from graft.workbench.discover.known import Known

# torch's own, which ATen's table stands for, and graft's
OWN = frozenset(
    {
        "aten",
        "prim",
        "prims",
        "graft",
        "profiler",
        "quantized",
        "mkldnn",
        "mkl",
        "onednn",
        "xnnpack",
        "sparse",
        "c10d",
    }
    | {
        "inductor",
        "higher_order",
        "debugprims",
        "rngprims",
        "static_runtime",
        "cuda",
        "_test",
        "_quantized",
        "nvprims",
    }
    | {"_caffe2", "torchvision", "image", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"}
    | {"c10d_functional", "onnx", "onnx_symbolic", "mkldnn_prepacked", "quantization"}
    | {"inductor_prims", "debug_mode_ops", "_inductor_test", "flex_lib"}
    | {"streams", "export", "fsdp", "custom_op", "bucketing", "rand", "triton", "dtensor", "sdpa", "_native"}
)
CPU_KEYS = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")
MOST_TENSORS, MOST_NUMBERS = 5, 2
MOST_OPS = 400  # of others: comparing takes a millisecond each


def installed_kernels() -> tuple[Known, ...]:
    """What is registered now; importing a package may add to it."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.partition("::")[0] not in OWN]
    return kernels_of(tuple(sorted(names)[:MOST_OPS]))


@cache
def kernels_of(names: tuple[str, ...]) -> tuple[Known, ...]:
    return tuple(known for name in names if (known := known_of(name)) is not None)


def known_of(name: str) -> Known | None:
    """None where it does not run on a CPU, or takes other things than tensors and numbers."""
    if not any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in CPU_KEYS):
        return None
    op = overload(name)
    if op is None:
        return None
    kinds = [str(argument.type) for argument in op._schema.arguments]
    written = [i for i, a in enumerate(op._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    needed = [i for i, a in enumerate(op._schema.arguments) if not a.has_default_value()]
    tensors = [i for i in needed if kinds[i] == "Tensor" and i not in written]
    numbers = [i for i in needed if kinds[i] in ("float", "number")]
    gives = [str(result.type) for result in op._schema.returns]
    out_form = written == [0] and gives in ([], ["Tensor"])
    if {*tensors, *numbers, *written} != set(needed) or not ((gives == ["Tensor"] and not written) or out_form):
        return None
    if not 1 <= len(tensors) <= MOST_TENSORS or len(numbers) > MOST_NUMBERS:
        return None
    call = caller(op, tensors, numbers, out_form)
    note = "it writes its first argument, which graft does not call yet" if out_form else ""
    return Known("installed", name.replace(".default", ""), home_of(name), call, len(tensors), len(numbers), note)


def overload(name: str) -> OpOverload | None:
    space, _, rest = name.partition("::")
    base, _, which = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, space), base), which or "default")
    except (AttributeError, RuntimeError):
        return None


def caller(op: OpOverload, tensors: list[int], numbers: list[int], out_form: bool) -> Callable[..., Any]:
    """Takes the tensors first, then the numbers, whatever the order of its own arguments."""

    def call(*given: Any) -> Any:
        values = dict(zip((*tensors, *numbers), given, strict=True))
        if out_form:
            values[0] = torch.empty_like(given[0])
        arguments = [values[index] for index in sorted(values)]
        made = op(*arguments)
        return values[0] if out_form else made

    return call


def home_of(name: str) -> str:
    """`file:line` of its registration, as torch keeps it; the namespace where it keeps none."""
    found = re.findall(r"registered at (\S+?:\d+)", torch._C._dispatch_dump(name))
    return next((site for site in found if "/torch/_library/" not in site), name.partition("::")[0])
