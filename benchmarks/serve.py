"""What HTTP costs: the same requests by LLM.generate and by a server's streams, in turn, in one run.

python benchmarks/serve.py smollm2-135m --streams 1 8 32
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import graft
from graft.cli.show import quiet_libraries


async def streamed(host: str, port: int, body: bytes) -> tuple[float, int]:
    """Seconds to the first event, and how many there were. Bytes alone are looked at: the client has a core, too."""
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    started = time.perf_counter()
    writer.write(head.encode() + body)
    first, events = 0.0, 0
    while piece := await reader.read(65_536):
        if found := piece.count(b"data: {"):
            first = first or time.perf_counter() - started
            events += found
    writer.close()
    return first, events


async def all_at_once(host: str, port: int, bodies: Sequence[bytes]) -> list[tuple[float, int]]:
    return await asyncio.gather(*(streamed(host, port, body) for body in bodies))


def new_prompts(count: int, length: int, rng: random.Random, vocabulary: int) -> list[list[int]]:
    return [[rng.randrange(100, min(20_000, vocabulary)) for _ in range(length)] for _ in range(count)]


def by_generate(llm: graft.LLM, prompts: list[list[int]], tokens: int) -> float:
    params = graft.SamplingParams(max_tokens=tokens, ignore_eos=True)
    started = time.perf_counter()
    found = llm.generate(prompts, params)
    assert all(len(one.token_ids) == tokens for one in found)
    return time.perf_counter() - started


def by_http(address: tuple[str, int], prompts: list[list[int]], tokens: int) -> tuple[float, list[float]]:
    asked: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    bodies = [json.dumps({**asked, "prompt": prompt}).encode() for prompt in prompts]
    started = time.perf_counter()
    found = asyncio.run(all_at_once(*address, bodies))
    return time.perf_counter() - started, [first for first, _ in found]


def first_piece(llm: graft.LLM, prompt: list[int]) -> float:
    started = time.perf_counter()
    for _ in llm.stream(prompt, graft.SamplingParams(max_tokens=2, ignore_eos=True)):
        return time.perf_counter() - started
    raise AssertionError("no text came")


def measure(llm: graft.LLM, address: tuple[str, int], streams: int, rounds: int, tokens: int, length: int) -> None:
    """The best rounds are the least disturbed by what else the machine does."""
    rng, own, http, known = random.Random(streams), [], [], llm.model.module.config.vocab_size
    for _ in range(rounds):
        own.append(by_generate(llm, new_prompts(streams, length, rng, known), tokens))
        http.append(by_http(address, new_prompts(streams, length, rng, known), tokens)[0])
    ratios = [a / b for a, b in zip(own, http, strict=True)]
    shown = f"{statistics.median(ratios):.3f} of LLM.generate's throughput ({min(ratios):.3f} to {max(ratios):.3f})"
    best = f"best rounds {min(own) / min(http):.3f}"
    print(f"{streams:>3} streams: {streams * tokens / min(http):8.1f} tokens/s at best, {shown}, {best}", flush=True)


def first_tokens(llm: graft.LLM, address: tuple[str, int], count: int, length: int) -> None:
    """Of lone requests, in turn. The fastest tenth of each are the ones that no other job held up."""
    rng, known, own, http = random.Random(0), llm.model.module.config.vocab_size, [], []
    for _ in range(count):
        own.append(first_piece(llm, new_prompts(1, length, rng, known)[0]))
        http += by_http(address, new_prompts(1, length, rng, known), 2)[1]
    later = statistics.median(b - a for a, b in zip(own, http, strict=True))
    tenth = [statistics.mean(sorted(one)[: max(count // 10, 1)]) for one in (own, http)]
    print(
        f"first token, one request: {1e3 * later:+.1f} ms by HTTP (median of {count}); the fastest tenth of each:"
        f" {1e3 * tenth[0]:.2f} and {1e3 * tenth[1]:.2f} ms, {1e3 * (tenth[1] - tenth[0]):+.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--firsts", type=int, default=21, help="lone requests whose first token is timed")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32)
    given = parser.parse_args()
    quiet_libraries()
    llm = graft.LLM(given.model)
    command = [sys.executable, "-m", "graft", "serve", given.model, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL) as server:
        assert server.stdout is not None
        host, port = server.stdout.readline().split("http://")[1].split("/")[0].split(":")
        address = (host, int(port))
        first_tokens(llm, address, given.firsts, given.prompt)
        for streams in given.streams:
            measure(llm, address, streams, given.rounds, given.tokens, given.prompt)
        server.terminate()


if __name__ == "__main__":
    main()
