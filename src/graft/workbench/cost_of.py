"""`graft explain --cost`: from a model's name to what each kernel of a step costs, estimated or measured."""

from __future__ import annotations

import torch

from graft.base.files import Progress
from graft.base.timers import cpu_seconds, graph_seconds
from graft.bench.kernels.node_times import launch_us, node_times
from graft.bench.limits.roofline import cpu_read, gpu_read
from graft.bench.plan import Cell
from graft.engine.llm import LLM
from graft.models.load import load_model
from graft.passes.base import Context
from graft.passes.config import PipelineConfig, with_sets
from graft.passes.pipeline import run_pipeline
from graft.passes.registry import TransformRegistry, load_all
from graft.workbench.cost import Speed, StepCost, StepShape, step_cost
from graft.workbench.model import captured

EVERYWHERE = "[cuda, native, cpu, meta]"
IN_A_ROW = 64


def estimated_cost(
    name: str,
    config: PipelineConfig,
    shape: StepShape,
    speed: Speed,
    dtype: str = "auto",
    progress: Progress | None = None,
    *,
    trust_remote_code: bool = False,
) -> StepCost:
    """Without weights or a GPU: the graph with the fusions that a GPU and the native backend get."""
    model, gm = captured(name, dtype, progress, trust_remote_code=trust_remote_code)
    load_all()
    on_all = [f"transforms.{one}.devices={EVERYWHERE}" for one in TransformRegistry.with_key("devices")]
    settings = with_sets(config, on_all)
    report = run_pipeline(gm, settings, Context(route="decoder", context_length=model.context))
    return step_cost(gm, shape, speed, report, model=model.name)


def measured_cost(
    name: str,
    config: PipelineConfig,
    shape: StepShape,
    dtype: str = "auto",
    device: str = "auto",
    gb_per_s: float | None = None,
    launch: float | None = None,
    progress: Progress | None = None,
    *,
    backend: str = "auto",
    trust_remote_code: bool = False,
) -> StepCost:
    """An engine of the model, built here, and every kernel of its steps by the clock. gb_per_s and launch, in
    microseconds, are of estimates; what is not given is measured."""
    model = load_model(name, dtype=dtype, device=device, progress=progress, trust_remote_code=trust_remote_code)
    llm = LLM(model, config=config, backend=backend, progress=progress, max_num_seqs=shape.batch, enforce_eager=True)
    times = node_times(llm, Cell(shape.batch, shape.context))
    how = "steps of the native graph" if llm.backend == "native" else "each kind of call alone"
    if launch is None and llm.backend == "native":
        launch = launch_us(times)
    speed = machine_speed(llm.device, gb_per_s, launch)
    return step_cost(llm.graph_module, shape, speed, llm.report, times, model.name, f"{how}, {llm.backend}")


def machine_speed(device: torch.device, gb_per_s: float | None = None, launch_us: float | None = None) -> Speed:
    """Bytes read a second, and what a kernel over a few numbers takes; measured here where they are not given."""
    read = gb_per_s if gb_per_s is not None else (gpu_read(device) if device.type == "cuda" else cpu_read())[0] / 1e9
    launch = launch_us if launch_us is not None else tiny_us(device)
    measured = [what for what, given in (("bandwidth", gb_per_s), ("launch", launch_us)) if given is None]
    how = f"{' and '.join(measured)} measured on {device}" if measured else "both given"
    return Speed(read, launch, how)


def tiny_us(device: torch.device) -> float:
    """On a GPU in a CUDA graph, as steps run there."""
    x = torch.zeros(32, device=device)
    if device.type == "cuda":
        return graph_seconds(lambda: x.add_(1), device, in_a_row=IN_A_ROW) * 1e6
    return cpu_seconds(lambda: x.add_(1), in_a_row=IN_A_ROW) * 1e6
