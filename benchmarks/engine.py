"""The engine under load, all measured in this run: many requests against one, against Hugging Face, and its own cost.

python benchmarks/engine.py --dtype float32
python benchmarks/engine.py --dtype bfloat16 --baseline-prompt 2 --baseline-new 2  # where 16-bit matrices are slow
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import graft
from graft.bench.baselines.hf import EagerBaseline
from graft.cli.show import quiet_libraries
from graft.engine.engine import Engine
from graft.models.load import load_model


def traffic(count: int, vocabulary: int, rng: random.Random) -> list[tuple[int, list[int], graft.SamplingParams]]:
    """(step of arrival, prompt, parameters): prompts of 16 to 128 tokens, 24 to 64 new ones, four arrivals a step."""
    return [
        (
            i // 4,
            [rng.randrange(3, vocabulary) for _ in range(rng.randint(16, 128))],
            graft.SamplingParams(max_tokens=rng.randint(24, 64), ignore_eos=True),
        )
        for i in range(count)
    ]


def serve(llm: graft.LLM, requests: list[tuple[int, list[int], graft.SamplingParams]]) -> dict[str, float]:
    """All of them, arriving while others run: tokens a second from the first arrival to the last token."""
    pending, sent, steps, started = list(requests), [], 0, time.perf_counter()
    with llm.held() as engine:
        while pending or not engine.idle:
            while pending and pending[0][0] <= steps:
                _, prompt, params = pending.pop(0)
                sent.append(engine.add(prompt, params))
            engine.step()
            steps += 1
    seconds = time.perf_counter() - started
    new, fed = sum(len(r.new_tokens) for r in sent), sum(len(r.prompt) for r in sent)
    return {"seconds": seconds, "new_per_s": new / seconds, "all_per_s": (new + fed) / seconds, "steps": steps}


def hugging_face_batch(llm: graft.LLM, batch: int, prompt: int, new: int) -> float:
    """New tokens a second of one static batch of equal prompts, prefill included."""
    vocabulary = llm.model.module.config.vocab_size
    ids = [(7 * i + 100) % vocabulary for i in range(prompt)]
    started = time.perf_counter()
    EagerBaseline(llm.model).generate([ids] * batch, new)
    return batch * new / (time.perf_counter() - started)


class Clock:
    """Time spent inside some functions, calls from one to another counted once."""

    def __init__(self) -> None:
        self.seconds, self.depth = 0.0, 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started, self.depth = time.perf_counter(), self.depth + 1
            try:
                return function(*args, **kwargs)
            finally:
                self.depth -= 1
                if not self.depth:
                    self.seconds += time.perf_counter() - started

        return timed


def own_cost(llm: graft.LLM, batch: int, rng: random.Random) -> dict[str, float]:
    """Scheduler and block manager in steps of `batch` decoding requests, as a share of the step."""
    vocabulary = llm.model.module.config.vocab_size
    clock = Clock()
    with llm.held() as engine:
        seconds, steps = timed_steps(engine, batch, vocabulary, rng, clock)
    return {
        "batch": batch,
        "step_ms": 1e3 * seconds / steps,
        "scheduler_and_manager_us": 1e6 * clock.seconds / steps,
        "share_percent": 100 * clock.seconds / seconds,
    }


def timed_steps(engine: Engine, batch: int, vocabulary: int, rng: random.Random, clock: Clock) -> tuple[float, int]:
    params = graft.SamplingParams(max_tokens=48, ignore_eos=True)
    requests = [engine.add([rng.randrange(3, vocabulary) for _ in range(40)], params) for _ in range(batch)]
    while any(not r.new_tokens for r in requests):
        engine.step()
    engine.scheduler.schedule = clock.around(engine.scheduler.schedule)
    engine.scheduler.drop = clock.around(engine.scheduler.drop)
    engine.manager.commit = clock.around(engine.manager.commit)
    steps, started = 0, time.perf_counter()
    while all(r.finish_reason is None for r in requests):
        engine.step()
        steps += 1
    seconds = time.perf_counter() - started
    engine.abort(requests)
    for owner, name in ((engine.scheduler, "schedule"), (engine.scheduler, "drop"), (engine.manager, "commit")):
        delattr(owner, name)
    return seconds, steps


def first_token(llm: graft.LLM, prefix: int, rng: random.Random, repeats: int) -> dict[str, float]:
    """Time to the first token of a prompt, and of a second one with the same first `prefix` tokens."""
    vocabulary = llm.model.module.config.vocab_size
    params = graft.SamplingParams(max_tokens=1, ignore_eos=True)
    cold, warm = [], []
    for _ in range(repeats):
        shared = [rng.randrange(3, vocabulary) for _ in range(prefix)]
        for times in (cold, warm):
            tail = [rng.randrange(3, vocabulary) for _ in range(8)]
            started = time.perf_counter()
            (output,) = llm.generate([shared + tail], params)
            times.append(time.perf_counter() - started)
        assert output.cached_tokens == prefix // 16 * 16
    first, second = statistics.median(cold), statistics.median(warm)
    return {"prefix": prefix, "first_ms": 1e3 * first, "second_ms": 1e3 * second, "ratio": first / second}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--baseline-prompt", type=int, default=72)
    parser.add_argument("--baseline-new", type=int, default=44)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    quiet_libraries()
    llm = graft.LLM(load_model(args.model, dtype=args.dtype, device=args.device))
    vocabulary, rng = llm.model.module.config.vocab_size, random.Random(0)
    llm.generate([[5] * 20] * 4, graft.SamplingParams(max_tokens=3, ignore_eos=True))
    many, single = [], []
    for _ in range(args.repeats):
        single.append(
            statistics.mean(serve(llm, [(0, *one[1:])])["new_per_s"] for one in traffic(3, vocabulary, rng))
        )
        many.append(serve(llm, traffic(args.requests, vocabulary, rng))["new_per_s"])
    one, all_ = statistics.median(single), statistics.median(many)
    baseline = hugging_face_batch(llm, args.requests, args.baseline_prompt, args.baseline_new)
    result = {
        "one_request_tokens_per_s": one,
        "concurrent_tokens_per_s": all_,
        "ratio": all_ / one,
        "hugging_face_static_batch_tokens_per_s": baseline,
        "against_hugging_face": all_ / baseline,
        "own_cost": own_cost(llm, args.requests, rng),
        "first_token": first_token(llm, 512, rng, args.repeats),
        "setup": {**vars(args), "torch": torch.__version__, "threads": torch.get_num_threads()},
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
