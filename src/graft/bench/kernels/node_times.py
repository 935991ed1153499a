"""How long each call of a decoder's graph takes in a decode step, by its node's name; microseconds.

Native graphs note when each of their steps begins, so there it is the step itself that is measured. On other backends
every kind of call is timed alone on the inputs of a real step (api/profile.py): on a GPU with its weights out of the
cache, as in a step, but without the neighbours that it overlaps with there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graft.api.profile import measure_costs
from graft.bench.bench import prompts_for
from graft.bench.kernels.kernel_times import UNTIMED_TOKENS, WARM_UP_STEPS, run_steps
from graft.bench.kernels.native_times import Noted, watched
from graft.bench.plan import Cell
from graft.engine.llm import LLM
from graft.engine.params import SamplingParams

STEPS = 16


def node_times(llm: LLM, cell: Cell, steps: int = STEPS) -> dict[str, float]:
    """Of a step of `cell.batch` sequences after prompts of `cell.prompt` tokens. The engine must run its graph as it
    is, without CUDA graphs (enforce_eager)."""
    calls = prompts_for(llm.model, cell)
    params = SamplingParams(max_tokens=steps + UNTIMED_TOKENS, ignore_eos=True)
    with llm.held() as engine:
        requests = [engine.add(next(calls), params) for _ in range(cell.batch)]
        try:
            while any(not request.new_tokens for request in requests):
                engine.step()
            run_steps(llm, WARM_UP_STEPS, llm.device)
            with watched(engine.graph) as noted:
                if noted:
                    run_steps(llm, steps, llm.device)
                    return native_times(noted)
            return dict(measure_costs(llm.graph_module, step_inputs(engine)).by_node)
        finally:
            engine.abort(requests)


def native_times(noted: Noted) -> dict[str, float]:
    """On average; several steps may belong to one node, such as attention and its write to the cache."""
    found: dict[str, float] = {}
    for region, calls in noted.items():
        for stamps in calls:
            for step, begin, end in zip(region.program.steps, stamps, stamps[1:], strict=False):
                found[step.node] = found.get(step.node, 0.0) + (end - begin) / 1e3 / len(calls)
    return found


def step_inputs(engine: Any) -> tuple[Any, ...]:
    """What the graph is given in the next step."""
    graph, given = engine.graph, []

    def look(*inputs: Any) -> Any:
        given.append(inputs)
        return graph(*inputs)

    engine.graph = look
    try:
        engine.step()
    finally:
        engine.graph = graph
    return given[-1]


def launch_us(times: Mapping[str, float], least: int = 8) -> float | None:
    """What a call costs that does next to nothing: the median of the shortest, where there are enough."""
    shortest = sorted(times.values())[: max(least, len(times) // 8)]
    return shortest[len(shortest) // 2] if len(shortest) >= least else None
