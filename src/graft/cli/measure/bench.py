"""`graft bench`: how fast a model answers, beside Hugging Face on the same work."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graft.cli.documents import print_json
from graft.cli.load import load_llm
from graft.cli.measure.bench_families import Families, SideBySide, bench_families
from graft.cli.measure.bench_load import Preset, Rate, Requests, Throughput, read_loads, under_load
from graft.cli.measure.bench_server import (
    Clients,
    Endpoint,
    ExtraBody,
    Serve,
    ServerKey,
    bench_server,
    check_options,
)
from graft.cli.measure.bench_start import bench_start
from graft.cli.options import (
    DEFAULT_MODEL,
    Backend,
    CacheDtype,
    CacheMemory,
    ConfigFile,
    Device,
    DType,
    Json,
    Model,
    Nvtx,
    OffloadingSize,
    Plugins,
    Quantize,
    Sets,
    TensorParallel,
    TrustRemoteCode,
    read_numbers,
)

if TYPE_CHECKING:
    import torch

    from graft.bench.plan import BenchPlan
    from graft.bench.rows import Bench
    from graft.models.loaded import LoadedModel


Against = Annotated[
    str,
    typer.Option(help="Baselines, with commas between them: eager, compile, autotune, llama.cpp, openvino; or none."),
]
Peers = Annotated[
    bool,
    typer.Option(
        "--peers", help="All baselines of this kind of device; some compile for minutes at every batch size."
    ),
]
Threads = Annotated[int | None, typer.Option(help="Of all engines on a CPU. [the cores that the process may use]")]


Batches = Annotated[str | None, typer.Option(help="Batch sizes, with commas between them. [1,8,32; with --peers 1]")]
New = Annotated[int | None, typer.Option(help="Decode steps: new tokens after the first. [32; with --peers 127]")]
Kernels = Annotated[
    bool, typer.Option("--kernels", help="Instead: where the time of one decode step goes, kernel by kernel.")
]
StartOption = Annotated[
    bool,
    typer.Option("--start", help="Instead: new processes to their first token; cold, warm, from a compiled engine."),
]
AtOnce = Annotated[
    int | None, typer.Option(help="Requests that run at once. [256; with --throughput on a GPU up to 1024]")
]
TimeLimit = Annotated[
    float | None, typer.Option(help="Begin no baseline after this many seconds of measuring.", metavar="SECONDS")
]


def bench(
    ctx: typer.Context,
    model: Model = DEFAULT_MODEL,
    batch: Batches = None,
    prompt: Annotated[str, typer.Option(help="Tokens of each prompt; several with commas between them.")] = "128",
    new: New = None,
    repeats: Annotated[int, typer.Option(help="Repeats in turns; medians are shown.")] = 3,
    against: Against = "eager,compile",
    peers: Peers = False,
    threads: Threads = None,
    kernels: Kernels = False,
    start: StartOption = False,
    families: Families = False, side_by_side: SideBySide = None,  # noqa: ARG001 (read from the context)
    throughput: Throughput = None,
    preset: Preset = None,
    requests: Requests = None,
    rate: Rate = None,
    serve: Serve = None,
    clients: Clients = None,
    endpoint: Endpoint = "completions",
    api_key: ServerKey = None,
    extra_body: ExtraBody = None,
    max_num_seqs: AtOnce = None,
    time_limit: TimeLimit = None,
    dtype: DType = "auto",
    device: Device = "auto",
    backend: Backend = "auto",
    config: ConfigFile = None,
    sets: Sets = None,
    plugins: Plugins = None,
    quantize: Quantize = None,
    kv_cache_memory: CacheMemory = None,
    kv_offloading_size: OffloadingSize = None,
    kv_cache_dtype: CacheDtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    tensor_parallel: TensorParallel = None,
    nvtx: Nvtx = False,  # noqa: ARG001 (its callback does it)
    plot: Annotated[str | None, typer.Option(help="Also draw it: .png, .svg or .pdf.", metavar="FILE")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Measure latency and throughput over batch sizes, beside Hugging Face eager and torch.compile."""
    check_options(ctx, serve)
    if serve is not None:
        load = (clients, rate, requests, prompt, new, endpoint, api_key, extra_body)
        return bench_server(serve, None if model == DEFAULT_MODEL else model, *load, plot, as_json)
    if start:
        return bench_start(ctx, model, dtype, device, quantize, repeats, as_json)
    if families:
        return bench_families(ctx, as_json)
    target = checked_place(device, dtype)
    given: dict[str, Any] = {
        "dtype": dtype, "device": device, "config": config, "sets": sets, "plugins": plugins, "backend": backend,
        "quantize": quantize, "trust_remote_code": trust_remote_code, "kv_cache_dtype": kv_cache_dtype,
        "kv_offloading_size": kv_offloading_size, "tensor_parallel_size": tensor_parallel,
    }  # fmt: skip
    if throughput or preset:
        given |= {"max_num_seqs": max_num_seqs, "kv_cache_memory": kv_cache_memory}
        return under_load(model, read_loads(throughput, preset, requests, rate), preset, plot, as_json, **given)
    plan = make_plan(target, batch, prompt, new, repeats, against, peers, time_limit, threads)
    plan = of_ranks(ctx, plan, peers, model, tensor_parallel)
    bench_engine(model, plan, given, max_num_seqs or 256, kv_cache_memory, peers, kernels, plot, as_json)


def bench_engine(
    model: str,
    plan: BenchPlan,
    given: dict[str, Any],
    max_num_seqs: int,
    kv_cache_memory: str | None,
    peers: bool,
    kernels: bool,
    plot: str | None,
    as_json: bool,
) -> None:
    from graft.base.progress import CAPTURE
    from graft.bench.phases import PhaseClock
    from graft.bench.threads import use_threads
    from graft.cli.measure.bench_show import phase_lines

    check(model, plan, given["backend"], plot, kernels)
    module_runs = bool({*plan.against} - {"llama.cpp"})  # all others run the Hugging Face module
    with use_threads(plan.threads), phase_lines(peers) as progress:
        clock = PhaseClock(progress)
        llm = load_llm(
            model, clock, **given, keep_weights=module_runs, use_cache=False,
            max_num_seqs=max(max_num_seqs, *plan.batches),
            options_for=lambda loaded: cache_options(loaded, plan, kv_cache_memory, given["kv_cache_dtype"]),
        )  # fmt: skip
        notes = {"command": shlex.join(["graft", *sys.argv[1:]]), "build_phases": clock.phases()}
        if kernels:
            return table_of_kernels(llm, plan, notes, progress, as_json)
        result = measure(llm, plan, clock.since(CAPTURE), progress, notes, model)
    report(result, plot, as_json)


def of_ranks(ctx: typer.Context, plan: BenchPlan, peers: bool, model: str, ranks: int | None) -> BenchPlan:
    """Without baselines where there is nothing that they could run."""
    from graft.bench.ranks import no_baselines
    from graft.engine.artifact.format import is_engine
    from graft.engine.start import ranks_asked

    asked = peers or getattr(ctx.get_parameter_source("against"), "name", "") == "COMMANDLINE"
    without = no_baselines(plan.against, asked, ranks_asked(model, ranks), is_engine(model))
    return replace(plan, against=without)


def checked_place(device: str, dtype: str) -> torch.device:
    from graft.models import places

    target = places.resolve_device(device)
    places.resolve_dtype(dtype, target, places.DTYPES["float32"])
    return target


def make_plan(
    device: torch.device,
    batch: str | None,
    prompt: str,
    new: int | None,
    repeats: int,
    against: str,
    peers: bool,
    time_limit: float | None,
    threads: int | None,
) -> BenchPlan:
    from graft.bench.baselines.hf import PEERS
    from graft.bench.plan import BenchPlan
    from graft.bench.threads import checked_threads

    baselines = () if against == "none" else tuple(dict.fromkeys(against.split(",")))
    return BenchPlan(
        read_numbers("batch", batch if batch is not None else "1" if peers else "1,8,32"),
        read_numbers("prompt", prompt),
        (127 if peers else 32) if new is None else new,
        repeats,
        PEERS.get(device.type, PEERS["cpu"]) if peers else baselines,
        time_limit,
        checked_threads(threads, device),
    )


def check(model: str, plan: BenchPlan, backend: str, plot: str | None, kernels: bool) -> None:
    """What can be told to be wrong before the model is loaded."""
    from graft.backends.select import check_name
    from graft.base.errors import UsageError
    from graft.bench.plan import known_context
    from graft.bench.plot import check_plot

    plan.check_context(known_context(model))
    if plot and kernels:
        raise UsageError("--plot draws the table of engines; leave --kernels out")
    if plot:
        check_plot(Path(plot))
    check_name(backend)


def measure(llm: Any, plan: BenchPlan, built: float, progress: Any, notes: dict[str, Any], source: str) -> Bench:
    from graft.bench.bench import bench as run
    from graft.bench.limits.roofline import measure_roofline
    from graft.bench.threads import use_threads

    progress("measuring what this machine can do", 0, 1)
    module = llm.model.module
    with use_threads(plan.threads):  # rank 0 of several has a part of them
        roofline = measure_roofline(llm.device, module.dtype)
    return run(llm, plan, built, progress, roofline, notes, source)


def report(result: Bench, plot: str | None, as_json: bool) -> None:
    from graft.bench.plot import write_plot
    from graft.cli.measure.bench_show import show

    if as_json:
        print_json("bench", json.loads(result.to_json()))
    else:
        show(result)
    if plot and result.rows:
        write_plot(result, Path(plot))
    finish(result)


def table_of_kernels(llm: Any, plan: BenchPlan, notes: dict[str, Any], progress: Any, as_json: bool) -> None:
    from dataclasses import asdict

    from graft.bench.kernels.kernel_times import kernel_times
    from graft.bench.limits.machine import facts
    from graft.bench.limits.roofline import measure_roofline
    from graft.bench.ranks import rank_facts
    from graft.bench.threads import use_threads
    from graft.cli.measure.bench_show import show_kernels

    module = llm.model.module
    device = llm.device
    with use_threads(plan.threads):
        roofline = measure_roofline(device, module.dtype)
    tables = []
    for done, cell in enumerate(plan.cells()):
        progress(f"batch {cell.batch}, prompt {cell.prompt}: kernels", done, len(plan.batches) * len(plan.prompts))
        tables.append(kernel_times(llm, cell, max(1, plan.new // 2), roofline))
    if as_json:
        setup = {
            "model": llm.model.name,
            "backend": llm.backend,
            **facts(device),
            "roofline": asdict(roofline),
            **notes,
            **rank_facts(llm),
        }
        print_json("bench-kernels", {"setup": setup, "steps": [asdict(table) for table in tables]})
        return
    for table in tables:
        show_kernels(table, llm.model.name)


def cache_options(loaded: LoadedModel, plan: BenchPlan, asked: str | None, dtype: str) -> dict[str, Any]:
    from graft.bench.bench import cache_need

    return {"kv_cache_memory": asked or cache_need(loaded, plan, dtype)}


def finish(result: Bench) -> None:
    """Exit code 1 where the run was cut short or graft itself failed; baselines may fail."""
    from graft.cli.show import err

    if result.interrupted:
        done = len({(row.batch, row.prompt) for row in result.rows})
        total = len(result.setup["batches"]) * len(result.setup["prompts"])
        err.print(f"graft: interrupted; {done} of {total} batch sizes were measured")
    if result.interrupted or any(row.failed and row.engine == "graft" for row in result.rows):
        raise typer.Exit(1)
