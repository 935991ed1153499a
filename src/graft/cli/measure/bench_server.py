"""`graft bench --serve`: a server under load, graft's or another's."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graft.cli.documents import print_json

if TYPE_CHECKING:
    from graft.bench.server.http_client import HttpTarget
    from graft.bench.server.load import ServerRow
    from graft.bench.server.request import ServerPlan

Serve = Annotated[
    str | None,
    typer.Option(
        help="Instead: a server under load, graft's or any with OpenAI's API. MODEL is its name there.", metavar="URL"
    ),
]
Clients = Annotated[
    str | None,
    typer.Option(help="With --serve: clients that each send a request after another; several with commas. [1,8,32]"),
]
Endpoint = Annotated[str, typer.Option(help="With --serve: completions or chat.")]
ServerKey = Annotated[str | None, typer.Option(help="With --serve: its key.", envvar="OPENAI_API_KEY")]
ExtraBody = Annotated[
    str | None,
    typer.Option(help="With --serve: fields of every request; null takes one away.", metavar="JSON"),
]
OWN = {"clients", "endpoint", "extra_body"}  # mean nothing without --serve; nor does api_key, which may be inherited
SHARED = {"serve", "model", "api_key", "rate", "requests", "prompt", "new", "plot", "as_json"}
COMMON = {"plugins", "strict", "traceback"}
ROUNDS = 4  # requests of a client, where their number was left out
COLUMNS = ("requests", "failed", "tok/s", "req/s", "TTFT p50", "p99", "ITL p50", "p99", "E2E p50")


def check_options(ctx: typer.Context, serve: str | None) -> None:
    """An option that would do nothing is an error."""
    from graft.base.errors import UsageError

    given = {name for name in ctx.params if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    idle = given & OWN if serve is None else given - OWN - SHARED - COMMON
    if idle:
        name = sorted(idle)[0].replace("_", "-")
        why = "needs --serve URL" if serve is None else "says nothing about a server, which --serve measures as it is"
        raise UsageError(f"--{name} {why}")
    if "side_by_side" in given and not ctx.params["families"]:
        raise UsageError("--side-by-side needs --families, which builds several models")


def bench_server(
    url: str,
    model: str | None,
    clients: str | None,
    rate: float | None,
    requests: int | None,
    prompt: str,
    new: int | None,
    endpoint: str,
    key: str | None,
    extra: str | None,
    plot: str | None,
    as_json: bool,
) -> None:
    """One load after another; a row as soon as it is there."""
    import asyncio

    from graft.base.errors import UsageError, near
    from graft.bench.loads.spread import Load
    from graft.bench.plot import check_plot
    from graft.bench.server.http_client import HttpTarget
    from graft.bench.server.request import ENDPOINTS

    if endpoint not in ENDPOINTS:
        raise UsageError(f"--endpoint: unknown name {endpoint!r}{near(endpoint, ENDPOINTS)}")
    if clients is not None and rate is not None:
        raise UsageError("--clients is a closed loop and --rate an open one: give one of them")
    if plot:
        check_plot(Path(plot))
    numbers = (None,) if rate is not None else read("clients", clients or "1,8,32")
    loads = [
        (count, Load(isl, 64 if new is None else new, ROUNDS * (count or 8) if requests is None else requests, rate))
        for isl in read("prompt", prompt)
        for count in numbers
    ]
    target, fields = HttpTarget.of(url, key), read_fields(extra)
    setup, rows, cut = asyncio.run(measure(target, model, endpoint, loads, fields))
    setup |= {"url": url, "command": shlex.join(["graft", *without_key(sys.argv[1:])])}
    report(setup, rows, cut, plot, as_json)


async def measure(
    target: HttpTarget,
    model: str | None,
    endpoint: str,
    loads: Sequence[tuple[int | None, Any]],
    extra: dict[str, Any],
) -> tuple[dict[str, Any], list[ServerRow], bool]:
    """Rows, and whether Ctrl-C ended it before all were there."""
    import asyncio

    from graft.bench.server.load import measure_server
    from graft.bench.server.request import ServerPlan, first_model, words_for
    from graft.cli.waiting import end_waiting

    name = model or await first_model(target)
    rows: list[ServerRow] = []
    words: dict[int, int] = {}
    end_waiting()
    with counting() as progress:
        try:
            for clients, load in loads:
                plan: ServerPlan = ServerPlan(name, endpoint, load, clients, extra)
                if load.isl not in words:
                    words[load.isl] = await words_for(target, plan)
                rows.append(await measure_server(target, plan, words[load.isl], progress))
        except asyncio.CancelledError:  # Ctrl-C: what is there is shown
            return {"model": name, "endpoint": endpoint, **here()}, rows, True
    return {"model": name, "endpoint": endpoint, **here()}, rows, False


@contextmanager
def counting() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on standard error, without the libraries that progress_bar quiets: no model is loaded here."""
    from rich.progress import Progress

    from graft.cli.show import err

    with Progress(console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("starting", total=None)

        def report_done(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield report_done


def here() -> dict[str, Any]:
    import os
    import platform
    from datetime import UTC, datetime

    return {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def without_key(arguments: Sequence[str]) -> list[str]:
    """The command as it may be kept."""
    found, hide = [], False
    for one in arguments:
        found.append("***" if hide else "--api-key=***" if one.startswith("--api-key=") else one)
        hide = one == "--api-key"
    return found


def read(name: str, text: str) -> tuple[int, ...]:
    from graft.base.errors import UsageError

    try:
        found = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise UsageError(f"--{name} takes numbers with commas between them, not {text!r}") from None
    if min(found) < 1:
        raise UsageError(f"--{name}: numbers must be at least 1, not {min(found)}")
    return found


def read_fields(text: str | None) -> dict[str, Any]:
    from graft.base.errors import UsageError

    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise UsageError(f"--extra-body is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError('--extra-body takes a JSON object, such as {"top_p": 0.9}')
    return found


def report(setup: dict[str, Any], rows: Sequence[ServerRow], cut: bool, plot: str | None, as_json: bool) -> None:
    """Exit code 1 where it was cut short, or nothing was answered; some failures are what a load shows."""
    from dataclasses import asdict

    from graft.bench.server.plot import write_server_plot
    from graft.cli.show import err

    if as_json:
        print_json("bench-server", {"setup": setup, "interrupted": cut, "rows": [asdict(row) for row in rows]})
    else:
        show(setup, rows)
    if plot and rows:
        write_server_plot(setup, rows, Path(plot))
    if cut:
        err.print(f"graft: interrupted; {len(rows)} loads were measured")
    if cut or not all(row.answered for row in rows):
        raise typer.Exit(1)


def show(setup: dict[str, Any], rows: Sequence[ServerRow]) -> None:
    from graft.cli.measure.bench_show import number, plain_table
    from graft.cli.measure.load_show import both
    from graft.cli.show import out

    table = plain_table(f"{setup['model']} at {setup['url']}, {setup['endpoint']}")
    for name in ("ISL/OSL", "clients" if not rows or rows[0].clients else "rate", *COLUMNS):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        first, between = both(row.first_token), both(row.between_tokens)
        isl = "?" if row.prompt_tokens is None else f"{row.prompt_tokens:.0f}"
        table.add_row(
            f"{isl}/{row.output_tokens:.0f}", row.name, str(row.load.requests), str(sum(row.errors.values())),
            number(row.output_tokens_per_s), number(row.requests_per_s), *map(number, (*first, *between)),
            number(row.whole.p50 if row.whole else None),
        )  # fmt: skip
    out.print(table)
    for row in rows:
        for what, count in row.errors.items():
            out.print(f"{row.name}: {count} failed: {what}", markup=False, soft_wrap=True)
        if row.resent:
            told = f"{row.resent} sent again: the server had closed a connection that it was to keep"
            out.print(f"{row.name}: {told}", markup=False, soft_wrap=True)
        if row.behind:
            out.print(f"{row.name}: {row.behind}", markup=False, soft_wrap=True)
    out.print(
        "ISL/OSL: tokens of a prompt and an answer, on average, as the server counts them. TTFT, ITL, E2E: ms until"
        " the first text of an answer, between two pieces of it, and to its end. tok/s and req/s: of whole answers.",
        markup=False,
    )
