"""The server: tools, pages and files to read, a prompt for each skill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mcp.server import MCPServer

import graft
from graft import __version__
from graft.base.errors import UsageError
from graft.mcp.runner import PAGE
from graft.mcp.tools import LIMIT, Tools
from graft.mcp.workspace import Workspace
from graft.workbench.skills import Skill, all_skills

INSTRUCTIONS = (
    "graft finds, writes, checks and measures graph fusions of decoder models. Start with discover(model); write with"
    " new_transform, review with check, or let autofuse do all of it. Paths are inside the workspace. Answers longer"
    " than a page have next_offset: call more."
)


def make_server(workspace: Workspace, limit: float = LIMIT) -> MCPServer:
    server = MCPServer("graft", version=__version__, instructions=INSTRUCTIONS, log_level="WARNING")
    for tool in Tools(workspace, limit).all():
        server.add_tool(tool, structured_output=True)

    @server.resource("graft://workspace/{+path}", mime_type="text/plain")
    def file(path: str) -> str:
        """A text file of the workspace: a dump, a report, a note, a package's source; its first page."""
        found = workspace.root / workspace.inside(path, "file")
        if not found.is_file():
            raise UsageError(f"the workspace has no file {path}")
        return found.read_text(errors="replace")[:PAGE]

    for page in sorted(docs_folder().glob("*.md")):
        server.resource(f"graft://docs/{page.stem}", name=page.stem, mime_type="text/markdown")(reader(page))
    for skill in all_skills():
        server.prompt(skill.name, description=skill.description)(prompt(skill))
    return server


async def described(server: MCPServer) -> dict[str, Any]:
    """What a client is told of the server when it asks."""
    return {
        "name": server.name,
        "version": __version__,
        "tools": [one.model_dump(mode="json", exclude_none=True) for one in await server.list_tools()],
        "resources": [str(one.uri) for one in await server.list_resources()],
        "templates": [one.uri_template for one in await server.list_resource_templates()],
        "prompts": [one.name for one in await server.list_prompts()],
    }


def docs_folder() -> Path:
    """In a checkout; a wheel has none."""
    return Path(graft.__file__).parents[2] / "docs"


def reader(page: Path) -> Callable[[], str]:
    def read() -> str:
        return page.read_text()

    return read


def prompt(skill: Skill) -> Callable[[], str]:
    def text() -> str:
        return skill.text

    return text
