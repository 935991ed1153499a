"""graft's server and another one under the same load, in turn, in one run: ratios of throughput and of p99 latency.

python benchmarks/serve_peer.py http://127.0.0.1:8000/v1 http://127.0.0.1:8080/v1 --clients 1 8 32

Both must serve the same file; how they were started is the caller's part.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from statistics import median

from graft.bench.http_client import HttpTarget
from graft.bench.load import Load
from graft.bench.server_load import ServerRow, measure_server
from graft.bench.server_request import ServerPlan, first_model, words_for


async def measured(url: str, load: Load, clients: int) -> ServerRow:
    target = HttpTarget.of(url, None)
    plan = ServerPlan(await first_model(target), "completions", load, clients)
    row = await measure_server(target, plan, await words_for(target, plan), lambda *_: None)
    assert row.answered == load.requests, row.errors
    assert abs(row.output_tokens - load.osl) < 0.5, f"{url} gave {row.output_tokens} tokens"
    return row


def figures(row: ServerRow) -> tuple[float, float, float]:
    """Tokens a second, p99 between tokens and p50 to the first, in ms."""
    assert row.between_tokens is not None and row.first_token is not None
    return row.output_tokens_per_s, 1e3 * row.between_tokens.p99, 1e3 * row.first_token.p50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("own")
    parser.add_argument("other")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=2, help="of each client")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=64)
    given = parser.parse_args()
    for clients in given.clients:
        load = Load(given.prompt, given.new, given.requests * clients, None)
        pairs = []
        for _ in range(given.rounds):
            pairs.append([figures(asyncio.run(measured(url, load, clients))) for url in (given.own, given.other)])
            own, other = pairs[-1]
            told = " ".join(f"{a:.1f}/{b:.1f}" for a, b in zip(own, other, strict=True))
            print(
                f"  {clients} clients: tok/s, ITL p99, TTFT p50 (ms): {told}, load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
        ratios = [[a / b for a, b in zip(own, other, strict=True)] for own, other in pairs]
        rate, between, first = (median(column) for column in zip(*ratios, strict=True))
        low, high = min(r[0] for r in ratios), max(r[0] for r in ratios)
        shown = f"throughput {rate:.2f} ({low:.2f} to {high:.2f}), ITL p99 {between:.2f}, TTFT p50 {first:.2f}"
        print(f"{clients} clients, medians of {given.rounds} ratios: {shown}", flush=True)


if __name__ == "__main__":
    main()
