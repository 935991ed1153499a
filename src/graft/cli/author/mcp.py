"""`graft mcp`: the workbench for agents that speak the Model Context Protocol."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from graft.cli.documents import print_json


def mcp(
    workspace: Annotated[Path, typer.Option(help="The folder that tools read and write in.", metavar="DIR")] = Path(
        "."
    ),
    http: Annotated[bool, typer.Option("--http", help="Streamable HTTP on this machine instead of stdio.")] = False,
    port: Annotated[int, typer.Option(help="Of --http.", min=1, max=65535)] = 8765,
    limit: Annotated[float, typer.Option(help="Seconds of one call.")] = 600.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print tools with their schemas, resources and prompts; serve nothing.")
    ] = False,
) -> None:
    """Serve the workbench over the Model Context Protocol: tools, pages to read, a prompt for each skill."""
    from graft.base.errors import ExtraMissing, UsageError
    from graft.mcp.workspace import Workspace

    if not limit > 0:
        raise UsageError(f"--limit must be more than 0 seconds, but is {limit:g}")
    folder = Workspace(workspace)
    if find_spec("mcp") is None:
        raise ExtraMissing("graft mcp", "mcp", "mcp")
    from graft.mcp.server import make_server

    server = make_server(folder, limit)
    if as_json:
        import asyncio

        from graft.mcp.server import described

        print_json("mcp", asyncio.run(described(server)))
    elif http:
        server.run("streamable-http", host="127.0.0.1", port=port)
    else:
        server.run("stdio")
