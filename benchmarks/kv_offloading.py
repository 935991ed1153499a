"""What host memory for evicted blocks gains: the same requests with and without it, in turns, medians of repeats.

conversations: each comes back with its whole history when those of the others have taken its blocks.
preemption: requests that are let in greedily and then take each other's blocks away.

python benchmarks/kv_offloading.py [MODEL] [--cache 4GiB] [--host 32GiB] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import graft
from graft.cli.show import quiet_libraries


@dataclass(frozen=True)
class LoadRun:
    """Seconds of the load, and its new tokens. computed: tokens asked for that were found nowhere, those of requests
    that gave way and came back included. reloaded: tokens found in host memory."""

    seconds: float
    tokens: int
    computed: int
    reloaded: int
    preemptions: int


Batches = Iterator[list[list[int]]]  # of prompts


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 120) for _ in range(length)] for _ in range(count)]


def conversations(args: argparse.Namespace, room: int, seed: int) -> Batches:  # noqa: ARG001
    """One prompt at a time: every conversation of a round, before any of the next."""
    histories = prompts(args.conversations, args.history, seed)
    for turn in range(args.rounds):
        for history, question in zip(histories, prompts(args.conversations, 32, seed + 1 + turn), strict=True):
            history += question
            yield [list(history)]


def preemption(args: argparse.Namespace, room: int, seed: int) -> Batches:
    """All at once: they fit as they come, and not as they grow."""
    yield prompts(max(room // (args.history + 16), 2), args.history, seed)


def measure(llm: graft.LLM, load: Callable[..., Batches], args: argparse.Namespace, seed: int) -> LoadRun:
    manager, preempted, tokens = llm.engine.manager, 0, 0
    params = graft.SamplingParams(max_tokens=4 if load is conversations else args.new, ignore_eos=True)
    before, started = manager.stats(), time.perf_counter()
    for batch in load(args, manager.blocks * manager.block_size, seed):
        tokens += sum(len(one.token_ids) for one in llm.generate(batch, params))
        preempted += llm.stats.preemptions
    seconds, after = time.perf_counter() - started, manager.stats()
    computed = (after.asked_tokens - before.asked_tokens) - (after.reused_tokens - before.reused_tokens)
    return LoadRun(seconds, tokens, computed, after.reloaded_tokens - before.reloaded_tokens, preempted)


def in_turns(llms: dict[str, graft.LLM], load: Callable[..., Batches], args: argparse.Namespace) -> dict[str, Any]:
    """The first repeat is not counted."""
    runs: dict[str, list[LoadRun]] = {name: [] for name in llms}
    for repeat in range(args.repeats + 1):
        for name, llm in llms.items():
            runs[name].append(measure(llm, load, args, 1000 * repeat))
    for name, (_, *each) in runs.items():
        median, last = statistics.median(run.seconds for run in each), each[-1]
        counts = f"computed {last.computed:,}, reloaded {last.reloaded:,}, preempted {last.preemptions}"
        print(f"{load.__name__:14} {name:8} {median:8.2f} s {last.tokens / median:9.1f} tok/s   {counts}", flush=True)
    ratios = [a.seconds / b.seconds for a, b in zip(runs["without"][1:], runs["with"][1:], strict=True)]
    print(
        f"{load.__name__:14} × {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})", flush=True
    )
    return {"load": load.__name__, **{name: [asdict(run) for run in each] for name, each in runs.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--cache", default="64MiB")
    parser.add_argument("--host", default="1GiB")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--history", type=int, default=512, help="tokens of a conversation before its first round")
    parser.add_argument("--new", type=int, default=128, help="tokens that a preempted request is to give")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    quiet_libraries()
    common: dict[str, Any] = {"kv_cache_memory": args.cache, "admission": "greedy", "self_check": False}
    llms = {"without": graft.LLM(args.model, **common)}
    llms["with"] = graft.LLM(args.model, **common, kv_offloading_size=args.host)
    for name, llm in llms.items():
        stats = llm.engine.manager.stats()
        print(f"{name}: {stats.blocks} blocks, {stats.host_blocks} in host memory", flush=True)
    found = [in_turns(llms, load, args) for load in (conversations, preemption)]
    print(json.dumps({"model": args.model, "loads": found}))


if __name__ == "__main__":
    main()
