"""What a benchmark says of an engine on several ranks, and what each of their devices reads."""

from __future__ import annotations

from typing import Any

from graft.base.errors import UsageError
from graft.bench.limits.traffic import cache_bytes, graph_weight_bytes
from graft.engine.llm import LLM
from graft.engine.ranks.leader import LeaderGraph


def leader_of(llm: LLM) -> LeaderGraph | None:
    graph = llm.engine.graph
    return graph if isinstance(graph, LeaderGraph) else None


def lowered_of(llm: LLM) -> Any:
    """What runs on this rank."""
    leader = leader_of(llm)
    return llm.engine.graph if leader is None else leader.graph


def devices_of(llm: LLM) -> int:
    """How many share what a step reads and computes: ranks over gloo are on one machine, or one GPU."""
    leader = leader_of(llm)
    return leader.group.world if leader is not None and leader.group.backend == "nccl" else 1


def quantized_bytes(llm: LLM, batch: int) -> float | None:
    """Weights that a step of so many sequences reads on all ranks together; None where none is quantized. Ranks have
    parts alike."""
    leader, found = leader_of(llm), graph_weight_bytes(llm.graph_module, batch)
    return found if found is None or leader is None else found * leader.group.world


def kept_bytes(llm: LLM, tokens: float) -> float:
    """What all ranks together keep of one sequence."""
    leader, kept = leader_of(llm), cache_bytes(llm.model.module, tokens, layers=llm.cache.layers)
    return kept if leader is None else kept * leader.group.world


def rank_facts(llm: LLM) -> dict[str, Any]:
    """For the setup of a document; nothing of one rank. Exchanges: of all steps so far, the load's own included."""
    leader = leader_of(llm)
    if leader is None:
        return {}
    group, steps = leader.group, max(leader.steps, 1)
    counted = group.backend != "nccl"  # a call on a GPU ends before the exchange does
    told = {
        "ranks": group.world,
        "backend": group.backend,
        "exchanges_of_a_step": group.calls / steps,
        "bytes_of_a_step": group.bytes / steps,
        "communication_share": group.seconds / leader.seconds if counted and leader.seconds else None,
    }
    return {"tensor_parallel": told}


def no_baselines(against: tuple[str, ...], asked: bool, ranks: int, compiled: bool = False) -> tuple[str, ...]:
    """Baselines run the whole model in this process, which has a part of it, or of a compiled engine no module."""
    if compiled and against and asked:
        raise UsageError(
            f"a compiled engine is measured alone: it holds no Hugging Face module for {', '.join(against)}; leave"
            " --against and --peers out, or measure the model itself"
        )
    if ranks > 1 and against and asked:
        raise UsageError(
            f"--tensor-parallel measures graft alone: {', '.join(against)} would need all weights in one process;"
            " leave --against and --peers out, and measure them without --tensor-parallel"
        )
    return () if compiled or ranks > 1 else against
