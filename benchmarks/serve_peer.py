"""graft's server and another one under the same load, in turn, in one run: ratios of throughput and of p99 latency.

python benchmarks/serve_peer.py http://127.0.0.1:8000/v1 http://127.0.0.1:8080/v1 --clients 1 8 32

Both must serve the same file; how they were started is the caller's part. --processes: the numbers of their
processes, whose CPU time is told instead: on a machine that others use, it is what stays comparable.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from statistics import median

from graft.bench.loads.spread import Load
from graft.bench.server.http_client import HttpTarget
from graft.bench.server.load import ServerRow, measure_server
from graft.bench.server.request import ServerPlan, first_model, words_for


async def measured(url: str, load: Load, clients: int) -> ServerRow:
    target = HttpTarget.of(url, None)
    plan = ServerPlan(await first_model(target), "completions", load, clients)
    row = await measure_server(target, plan, await words_for(target, plan), lambda *_: None)
    assert row.answered == load.requests, row.errors
    assert abs(row.output_tokens - load.osl) < 0.5, f"{url} gave {row.output_tokens} tokens"
    return row


def cpu_seconds(process: int) -> float:
    """Of a process and its children, those that have ended not counted."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_seconds(int(child)) for child in children)


def cpu_per_token(url: str, process: int, load: Load, clients: int) -> float:
    """Milliseconds; prompts are in it."""
    before = cpu_seconds(process)
    row = asyncio.run(measured(url, load, clients))
    return 1e3 * (cpu_seconds(process) - before) / (row.answered * row.output_tokens)


def figures(row: ServerRow) -> tuple[float, float, float]:
    """Tokens a second, p99 between tokens and p50 to the first, in ms."""
    assert row.between_tokens is not None and row.first_token is not None
    return row.output_tokens_per_s, row.between_tokens.p99, row.first_token.p50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("own")
    parser.add_argument("other")
    parser.add_argument("--processes", type=int, nargs=2)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=2, help="of each client")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=64)
    given = parser.parse_args()
    for clients in given.clients:
        load = Load(given.prompt, given.new, given.requests * clients, None)
        if given.processes:
            told = zip((given.own, given.other), given.processes, strict=True)
            own, other = (cpu_per_token(url, process, load, clients) for url, process in told)
            print(f"{clients} clients: {own:.2f} and {other:.2f} ms of CPU a token, {other / own:.2f}", flush=True)
            continue
        pairs = []
        for _ in range(given.rounds):
            pairs.append([figures(asyncio.run(measured(url, load, clients))) for url in (given.own, given.other)])
            own, other = pairs[-1]
            told = " ".join(f"{a:.1f}/{b:.1f}" for a, b in zip(own, other, strict=True))
            what = f"  {clients} clients: tok/s, ITL p99, TTFT p50 (ms)"
            print(f"{what}: {told}, load {os.getloadavg()[0]:.1f}", flush=True)
        ratios = [[a / b for a, b in zip(own, other, strict=True)] for own, other in pairs]
        rate, between, first = (median(column) for column in zip(*ratios, strict=True))
        low, high = min(r[0] for r in ratios), max(r[0] for r in ratios)
        shown = f"throughput {rate:.2f} ({low:.2f} to {high:.2f}), ITL p99 {between:.2f}, TTFT p50 {first:.2f}"
        print(f"{clients} clients, medians of {given.rounds} ratios: {shown}", flush=True)


if __name__ == "__main__":
    main()
