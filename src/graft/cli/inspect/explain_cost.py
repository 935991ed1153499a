"""`graft explain --cost`: what each kernel of a decode step costs, and which are not fused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from graft.cli.documents import print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graft.passes.config import PipelineConfig
    from graft.workbench.cost import KernelCost, StepCost, StepShape

Cost = Annotated[
    bool, typer.Option("--cost", help="Instead: what each kernel of a decode step costs, and which are not fused.")
]
Measure = Annotated[bool, typer.Option("--measure", help="With --cost: build the engine here and time its kernels.")]
Batch = Annotated[int | None, typer.Option(help="With --cost: sequences of the step. [1]")]
ContextTokens = Annotated[int | None, typer.Option("--context", help="With --cost: tokens of each so far. [128]")]
Bandwidth = Annotated[float | None, typer.Option(help="With --cost: of the machine. [measured here]", metavar="GB/s")]
Launch = Annotated[
    float | None,
    typer.Option(help="With --cost: what a kernel takes beyond its bytes. [measured here]", metavar="US"),
]
Sizes = tuple[int | None, int | None, float | None, float | None]


def explain_cost(
    model: str,
    transform: str | None,
    settings: PipelineConfig,
    cost: bool,
    measure: bool,
    sizes: Sizes,
    dtype: str,
    device: str,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    from graft.cli.show import progress_bar
    from graft.models.places import resolve_device
    from graft.workbench.cost_of import estimated_cost, machine_speed, measured_cost

    shape, bandwidth, launch = checked(transform, cost, sizes)
    target = resolve_device(device)
    with progress_bar() as progress:
        if measure:
            found = measured_cost(
                model, settings, shape, dtype, device, bandwidth, launch, progress,
                trust_remote_code=trust_remote_code,
            )  # fmt: skip
        else:
            speed = machine_speed(target, bandwidth, launch)
            kind = "bfloat16" if dtype == "auto" else dtype  # as on a GPU, whose fusions are what is estimated
            found = estimated_cost(model, settings, shape, speed, kind, progress, trust_remote_code=trust_remote_code)
    if as_json:
        print_json("explain-cost", found.to_dict())
    else:
        show_cost(found)


def checked(transform: str | None, cost: bool, sizes: Sizes) -> tuple[StepShape, float | None, float | None]:
    """What can be told to be wrong before the model is loaded."""
    from graft.base.errors import UsageError
    from graft.workbench.cost import StepShape

    if not cost:
        raise UsageError("--measure, --batch, --context, --bandwidth and --launch say how --cost counts; add --cost")
    if transform is not None:
        raise UsageError(f"--cost is about all kernels of a step; leave {transform} out")
    for name, given in zip(("batch", "context", "bandwidth", "launch"), sizes, strict=True):
        if given is not None and (given < 0 if name == "launch" else given <= 0):
            raise UsageError(f"--{name} must be more than 0, but is {given}")
    batch, context, bandwidth, launch = sizes
    return StepShape(batch or 1, context or 128), bandwidth, launch


def show_cost(found: StepCost) -> None:
    from graft.cli.show import out
    from graft.workbench.layers import ranges

    shape = found.shape
    out.print(
        f"{found.model}: a decode step of batch {shape.batch} after {shape.context} tokens",
        style="bold",
        markup=False,
    )
    for indices, kernels in found.layers().items():
        many = "" if indices is None else f"layer{'s' if len(indices) > 1 else ''} {ranges(indices)}"
        show_kernels(kernels, many or "outside the layers", measured=bool(found.measured))
    for line in summary(found):
        out.print(line, markup=False, soft_wrap=True)


def show_kernels(kernels: Sequence[KernelCost], title: str, *, measured: bool) -> None:
    from graft.cli.measure.bench_show import number
    from graft.cli.show import headed_table, out

    heads = ("kernel", "module", "reads", "MB >", "us >", *(("measured >",) if measured else ()))
    table = headed_table(*heads, title=title)
    for kernel in kernels:
        cells = [number(kernel.measured_us)] if measured else []
        reads = kernel.reads if kernel.fused else "not fused"
        name = kernel.op.removeprefix("graft.")
        table.add_row(name, kernel.place, reads, number(kernel.bytes / 1e6), number(kernel.us), *cells)
    out.print(table)
    for reason in dict.fromkeys(kernel.reason for kernel in kernels if kernel.reason):
        out.print(f"  {reason}", markup=False, soft_wrap=True)


def summary(found: StepCost) -> list[str]:
    from graft.cli.measure.bench_show import number, percent

    unfused, total = found.unfused, found.total(found.kernels)
    bytes_us = sum(kernel.bytes for kernel in found.kernels) / found.speed.gb_per_s / 1e3
    lost = found.total(unfused)
    lines = [
        f"not fused: {len(unfused)} of {len(found.kernels)} kernels, {number(lost)} of {number(total)} us a step"
        f" ({percent(100 * lost / total if total else 0)}); the bytes alone take {number(bytes_us)} us",
    ]
    if found.measured:
        lost, total = (found.total(some, measured=True) for some in (unfused, found.kernels))
        lines.append(
            f"measured ({found.measured}): {number(lost)} of {number(total)} us"
            f" ({percent(100 * lost / total if total else 0)}) are not fused"
        )
    speed = found.speed
    lines.append(
        f"us: bytes at {number(speed.gb_per_s)} GB/s and {number(speed.launch_us)} us a kernel ({speed.how});"
        " each call counts as one. not fused: it reads no weight matrix and no cache, so that one that does could"
        " compute it."
    )
    return lines
