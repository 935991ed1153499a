"""Stage 5, autotuning: what there was to choose from for each call, how long each choice took, and its tiles.

Inductor chooses twice: among templates and library calls for a matmul, while it compiles, and among configurations of
one Triton kernel (block sizes, warps), when that first runs.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch._inductor.config
import torch._inductor.graph

from graft.stages.needs import Reached, missing, swapped
from graft.stages.story_code import AutotuneRecord, KernelRecord, SingleChoice
from graft.stages.trace import current_graph

NEEDS = (
    "torch._inductor.select_algorithm:get_algorithm_selector_cache",
    "torch._inductor.select_algorithm:AlgorithmSelectorCache.__call__",
    "torch._inductor.graph:GraphLowering.run",
    "torch._inductor.utils:is_big_gpu",
)
CONFIGS = ("torch._inductor.runtime.triton_heuristics:CachingAutotuner.bench",)  # where there is Triton
NOT_ASKED = "no choices: autotuning is not asked for (--mode max-autotune)"
NO_CALLS = "nothing to choose: no matmul, convolution or attention that Inductor has templates for"
NOT_TIMED = "several choices and none timed: Inductor took one by a rule (option deterministic)"
NO_CONFIGS = "no configurations timed: each kernel has one, or an earlier run left its best one in the cache"
TILE = ("BLOCK_M", "BLOCK_K", "BLOCK_N")  # the order in which Inductor writes `tile_shape`


@dataclass
class SeenChoices:
    """asked: by graph, whether autotuning was on. calls: graph, call, and why there is a single choice, if so."""

    timed: list[AutotuneRecord] = field(default_factory=list)
    configs: list[AutotuneRecord] = field(default_factory=list)
    asked: dict[str, bool] = field(default_factory=dict)
    calls: list[tuple[str, str, str]] = field(default_factory=list)


@contextmanager
def watch_autotuning(seen: SeenChoices, reached: Reached) -> Iterator[None]:
    from torch._inductor.select_algorithm import AlgorithmSelectorCache, get_algorithm_selector_cache

    def save(timings: Mapping[Any, float], name: str, *_rest: Any, **_more: Any) -> None:
        seen.timed.append(record_of(current_graph(), name, timings))

    cache = get_algorithm_selector_cache()
    cache.add_feedback_saver(save)
    try:
        with ExitStack() as stack:
            stack.enter_context(swapped(AlgorithmSelectorCache, "__call__", lambda f: choosing(f, seen)))
            stack.enter_context(swapped(torch._inductor.graph.GraphLowering, "run", lambda f: asking(f, seen)))
            if not missing(CONFIGS):
                from torch._inductor.runtime.triton_heuristics import CachingAutotuner

                stack.enter_context(swapped(CachingAutotuner, "bench", lambda f: timing(f, seen, reached)))
            yield
    finally:
        cache.feedback_saver_fns.remove(save)


def record_of(graph: str, name: str, timings: Mapping[Any, float]) -> AutotuneRecord:
    """Choices that do not run on the device have no finite time; they are counted."""
    ran = sorted(((choice, float(ms)) for choice, ms in timings.items() if math.isfinite(ms)), key=lambda one: one[1])
    names = [getattr(choice, "name", str(choice)) for choice, _ in ran]
    tiles = {name: tile for name, (choice, _) in zip(names, ran, strict=True) if (tile := tile_of(choice))}
    ms = {name: time for name, (_, time) in zip(names, ran, strict=True)}
    return AutotuneRecord(graph, name, ms, tiles, failed=len(timings) - len(ran))


def asking(before: Callable[..., Any], seen: SeenChoices) -> Callable[..., Any]:
    def run(self: Any, *args: Any) -> Any:
        seen.asked[current_graph()] = is_asked()
        return before(self, *args)

    return run


def is_asked() -> bool:
    config: Any = torch._inductor.config
    return bool(config.max_autotune or config.max_autotune_gemm)


def choosing(before: Callable[..., Any], seen: SeenChoices) -> Callable[..., Any]:
    def select(
        self: Any, name: str, choices: Sequence[Any], input_nodes: Any, layout: Any, *rest: Any, **more: Any
    ) -> Any:
        why = why_single(name, choices[0], layout.device) if len(choices) == 1 else ""
        seen.calls.append((current_graph(), name, why))
        return before(self, name, choices, input_nodes, layout, *rest, **more)

    return select


def why_single(name: str, choice: Any, device: torch.device) -> str:
    """Why no template competes with it, as far as settings and the device say it."""
    config: Any = torch._inductor.config
    only = f"one choice, {getattr(choice, 'name', choice)}: "
    convolution = name.startswith("convolution")
    option = "max_autotune_conv_backends" if convolution else "max_autotune_gemm_backends"
    language = "TRITON" if device.type == "cuda" else "CPP"
    backends = [one.strip().upper() for one in getattr(config, option).split(",")]
    if device.type == "cpu" and convolution:
        return f"{only}there is no template for a convolution on a CPU"
    if language not in backends:
        return f"{only}{option} has no {language}, only {', '.join(backends)}"
    if device.type == "cpu" and not config.freezing:
        return f"{only}templates for a CPU take constant weights, of a module with option freezing=true"
    if device.type == "cuda":
        from torch._inductor.utils import is_big_gpu

        if not is_big_gpu(device):
            return f"{only}Inductor has templates for GPUs of 68 multiprocessors and more"
    return f"{only}no template takes its sizes, dtypes or layouts"


def tile_of(choice: Any) -> str:
    """`BLOCK_M 64, BLOCK_N 32, BLOCK_K 128, num_warps 4, num_stages 3` of a Triton template; empty for others."""
    info = choice.info_dict() if hasattr(choice, "info_dict") else {}
    try:
        shape = ast.literal_eval(str(info.get("tile_shape")))
    except (ValueError, SyntaxError):
        return ""
    sizes = dict(zip(TILE, shape, strict=False)) if isinstance(shape, tuple) else {}
    found = {name: sizes.get(name, -1) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K")}
    found |= {name: info.get(name, -1) for name in ("num_warps", "num_stages")}
    return ", ".join(f"{name} {value}" for name, value in found.items() if value != -1)


def timing(before: Callable[..., Any], seen: SeenChoices, reached: Reached) -> Callable[..., Any]:
    """Every configuration of a Triton kernel that is timed, by the search of neighbours, too."""

    def bench(self: Any, launcher: Any, *args: Any, **kwargs: Any) -> Any:
        ms = before(self, launcher, *args, **kwargs)
        name = str((getattr(self, "inductor_meta", None) or {}).get("kernel_name", ""))
        if reached.graph and name and isinstance(ms, (int, float)):
            seen.configs.append(config_record(reached.graph, name, launcher, float(ms)))
        return ms

    return bench


def config_record(graph: str, name: str, launcher: Any, ms: float) -> AutotuneRecord:
    if not math.isfinite(ms):  # it spills more registers than Inductor allows, or does not run
        return AutotuneRecord(graph, name, {}, failed=1)
    tile = config_text(launcher)
    registers, spills = (counted(tile, launcher, fact) for fact in ("n_regs", "n_spills"))
    return AutotuneRecord(graph, name, {tile: ms}, registers=registers, spills=spills)


def counted(tile: str, launcher: Any, name: str) -> dict[str, int]:
    value = getattr(launcher, name, None)
    return {} if value is None else {tile: int(value)}


def config_text(launcher: Any) -> str:
    """`XBLOCK 128, num_warps 4, num_stages 1`."""
    config = getattr(launcher, "config", None)
    sizes = [f"{name} {value}" for name, value in getattr(config, "kwargs", {}).items()]
    sizes += [f"{name} {getattr(config, name)}" for name in ("num_warps", "num_stages") if hasattr(config, name)]
    return ", ".join(sizes)


def configs_of(seen: SeenChoices, kernels: Sequence[KernelRecord]) -> tuple[AutotuneRecord, ...]:
    """By kernel, the fastest first; not those of trials that became no kernel."""
    known = {(one.graph, one.name) for one in kernels}
    found: dict[tuple[str, str], AutotuneRecord] = {}
    for one in seen.configs:
        if (key := (one.graph, one.name)) in known:
            had = found.get(key, AutotuneRecord(*key, {}))
            found[key] = replace(
                had,
                ms={**had.ms, **one.ms},
                registers={**had.registers, **one.registers},
                spills={**had.spills, **one.spills},
                failed=had.failed + one.failed,
            )
    return tuple(
        replace(one, ms=dict(sorted(one.ms.items(), key=lambda item: item[1])))
        for one in found.values()
        if len(one.ms) + one.failed > 1
    )


def single_choices(seen: SeenChoices) -> tuple[SingleChoice, ...]:
    return tuple(dict.fromkeys(SingleChoice(*one) for one in seen.calls if one[2] and seen.asked.get(one[0])))


def why_no_choices(seen: SeenChoices, configs: Sequence[AutotuneRecord], device: str) -> str:
    """Empty where something was timed, or single choices say it themselves."""
    if problem := missing(NEEDS):
        return f"choices cannot be watched: {problem}"
    if not any(seen.asked.values()):
        return NOT_ASKED if seen.calls else ""
    told = [] if seen.timed or seen.calls else [NO_CALLS]
    told += [NOT_TIMED] if seen.calls and not seen.timed and not any(why for _, _, why in seen.calls) else []
    told += [NO_CONFIGS] if device.startswith("cuda") and not configs else []
    return "; ".join(told)
