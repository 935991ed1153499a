"""graft mcp with the official client: tools, pages, resources, prompts, and nothing outside of the workspace."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import anyio
import pytest

mcp = pytest.importorskip("mcp")

from mcp import Client, StdioServerParameters  # noqa: E402
from mcp.client.stdio import stdio_client  # noqa: E402

import graft  # noqa: E402
from graft.base.errors import UsageError  # noqa: E402
from graft.mcp import runner  # noqa: E402
from graft.mcp.server import make_server  # noqa: E402
from graft.mcp.workspace import Workspace  # noqa: E402

TOOLS = {
    *(
        "models",
        "dump",
        "discover",
        "search",
        "explain",
        "diff",
        "new_transform",
        "check",
        "bench",
        "eval",
        "report",
        "repro",
        "stages",
        "autofuse",
        "more",
    ),
}


def with_client(server, work, **options):
    """What `work` makes of a connected client."""

    async def main():
        async with Client(server, **options) as client:
            return await work(client)

    return anyio.run(main)


def test_tools_are_typed_and_every_skill_is_a_prompt(tmp_path):
    async def work(client):
        return await client.list_tools(), await client.list_prompts(), await client.get_prompt("graph-dump")

    tools, prompts, prompt = with_client(make_server(Workspace(tmp_path)), work)
    assert {tool.name for tool in tools.tools} == TOOLS
    dump = next(tool for tool in tools.tools if tool.name == "dump")
    assert dump.input_schema["required"] == ["model", "folder"]
    assert dump.output_schema["properties"]["next_offset"] and "ok" in dump.output_schema["required"]
    assert {"add-fusion", "graph-dump", "find-candidates"} <= {one.name for one in prompts.prompts}
    assert "graft dump" in prompt.messages[0].content.text


def test_a_tool_answers_in_pages(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "PAGE", 300)
    seen = []

    async def told(progress, total, message):
        seen.append((progress, total))

    async def work(client):
        first = (await client.call_tool("models", {}, progress_callback=told)).structured_content
        text, offset = first["page"], first["next_offset"]
        while offset is not None:
            page = (await client.call_tool("more", {"result": first["result"], "offset": offset})).structured_content
            text, offset = text + page["page"], page["next_offset"]
        return first, text

    first, text = with_client(make_server(Workspace(tmp_path)), work)
    assert first["ok"] and first["data"] is None and len(first["page"]) == 300 and len(text) == first["total_chars"]
    assert "tiny-llama" in json.dumps(json.loads(text))
    assert seen and seen[-1][1] == 600.0


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("dump", {"model": "tiny-llama", "folder": "../outside"}),
        ("dump", {"model": "tiny-llama", "folder": "/tmp/outside"}),
        ("dump", {"model": "tiny-llama", "folder": "link/run"}),
        ("dump", {"model": "../model", "folder": "run"}),
        ("dump", {"model": "--help", "folder": "run"}),
        ("dump", {"model": "tiny-llama", "folder": "run", "sets": ["--config"]}),
        ("new_transform", {"name": "fuse_mine", "folder": ".."}),
        ("check", {"transform": "fuse_rope", "model": "tiny-llama", "note": "/tmp/note.md"}),
        ("discover", {"model": "tiny-llama", "plugins": ["/tmp/evil.py"]}),
        ("search", {"pattern": "/etc/passwd:f"}),
        ("more", {"result": "../../secret", "offset": 0}),
        ("report", {"run": "run", "file": "/tmp/report.html"}),
        ("repro", {"run": "..", "match": "fuse_rope:1", "file": "r.py"}),
        ("repro", {"run": "run", "match": "fuse_rope:1", "file": "../r.py"}),
        ("stages", {"target": "/etc/evil.py:f"}),
        ("stages", {"target": "tiny-llama", "folder": "/tmp/story"}),
        ("stages", {"target": "tiny-llama", "why": "--help"}),
        ("eval", {"model": "tiny-llama", "tasks": "/tmp/mine.yaml"}),
        ("eval", {"model": "tiny-llama", "tasks": "facts, ../mine.yaml"}),
    ],
)
def test_nothing_leads_out_of_the_workspace(tool, arguments, tmp_path):
    space = tmp_path / "space"
    space.mkdir()
    (space / "link").symlink_to(tmp_path)
    found = with_client(make_server(Workspace(space)), lambda client: client.call_tool(tool, arguments))
    answer = found.structured_content
    assert not answer["ok"] and answer["exit_code"] == 2
    assert "outside of the workspace" in answer["error"] or "is no" in answer["error"]
    assert sorted(os.listdir(tmp_path)) == ["space"] and sorted(os.listdir(space)) == ["link"]


def test_modules_of_the_workspace_are_not_run(tmp_path):
    (tmp_path / "yaml.py").write_text("import pathlib; pathlib.Path('ran').write_text('x')")
    found = with_client(make_server(Workspace(tmp_path)), lambda client: client.call_tool("models", {}))
    assert found.structured_content["ok"] and not (tmp_path / "ran").exists()


def test_a_workspace_that_writes_elsewhere_is_refused(tmp_path, monkeypatch):
    (tmp_path / "space").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "space" / ".graft").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="is a link"):
        Workspace(tmp_path / "space")
    monkeypatch.setenv("GRAFT_ENGINE_CACHE_DIR", str(tmp_path / "elsewhere"))
    (tmp_path / "own").mkdir()
    assert "GRAFT_ENGINE_CACHE_DIR" not in Workspace(tmp_path / "own").environment()


def test_files_and_pages_are_resources(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.md").write_text("# mine")

    async def work(client):
        mine = await client.read_resource("graft://workspace/notes/a.md")
        with pytest.raises(Exception, match=r"(?i)outside|unknown|not found|no file|error"):
            await client.read_resource("graft://workspace/../../etc/passwd")
        return mine, await client.list_resources()

    mine, listed = with_client(make_server(Workspace(tmp_path)), work)
    assert mine.contents[0].text == "# mine"
    assert "graft://docs/discover" in {str(one.uri) for one in listed.resources}


@pytest.mark.exhaustive
def test_reports_and_repros_of_a_dump(tmp_path):
    """Two folders of the workspace in, files of it out: what the workbench writes can be read as a resource."""

    async def work(client):
        async def call(tool, **arguments):
            found = (await client.call_tool(tool, arguments)).structured_content
            assert found["ok"], found["error"]
            return found["data"]

        await client.call_tool("dump", {"model": "tiny-llama", "folder": "run", "dtype": "float32"})
        listed = await call("repro", run="run")
        made = await call("repro", run="run", match=listed["items"][0]["id"], file="repro.py")
        page = await call("report", run="run", file="report.html")
        (tmp_path / "f.py").write_text("import torch\n\n\ndef f(x):\n    return torch.relu(x)\n\n\n" + INPUTS)
        told = await call("stages", target="f.py:f", ask="breaks", backend="eager")
        source = await client.read_resource("graft://workspace/repro.py")
        return made, page, told, source.contents[0].text

    INPUTS = "def f_inputs():\n    return [(torch.randn(4),)]\n"
    made, page, told, source = with_client(make_server(Workspace(tmp_path)), work)
    assert made["schema"] == "repro/1" and made["file"] == "repro.py" and "import torch" in source
    assert page["bytes"] == (tmp_path / "report.html").stat().st_size
    assert told["schema"] == "stages-ask/1" and told["answer"]


@pytest.mark.exhaustive  # test_errors_and_limits_are_answers: an error of a command that imports no torch
def test_a_wrong_name_is_told_to_the_client(tmp_path):
    wrong = with_client(make_server(Workspace(tmp_path)), explained)
    assert not wrong["ok"] and wrong["exit_code"] == 2 and "did you mean 'tiny-llama'" in wrong["error"]


async def explained(client):
    return (await client.call_tool("explain", {"model": "tiny-lama", "transform": "fuse_rope"})).structured_content


def test_errors_and_limits_are_answers(tmp_path):
    command = ("skills", "show", "graph-dum", "--json")
    wrong = anyio.run(runner.run_verb, Workspace(tmp_path), command, 600.0)
    assert not wrong["ok"] and wrong["exit_code"] == 2 and "did you mean 'graph-dump'" in wrong["error"]
    late = with_client(make_server(Workspace(tmp_path), 0.01), explained)
    assert late["exit_code"] == -1 and "took longer than" in late["error"]
    with pytest.raises(UsageError, match="is not a folder"):
        Workspace(tmp_path / "nowhere")


def test_a_call_that_is_cancelled_ends_its_process(tmp_path):
    def running():
        """Processes that work in the folder."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                found += [process.name] if os.readlink(process / "cwd") == str(tmp_path) else []
            except OSError:
                continue  # it has ended, or is another user's
        return found

    async def work(client):
        started = anyio.Event()

        async def told(progress, total, message):
            started.set()

        async with anyio.create_task_group() as group:
            group.start_soon(lambda: client.call_tool("dump", ARGUMENTS, progress_callback=told))
            await started.wait()
            assert running()
            group.cancel_scope.cancel()
        while running():
            await anyio.sleep(0.05)

    ARGUMENTS = {"model": "tiny-llama", "folder": "run"}
    with_client(make_server(Workspace(tmp_path)), work)
    assert not (tmp_path / "run").exists()


@pytest.mark.exhaustive
def test_from_a_model_to_an_accepted_fusion_over_stdio(tmp_path):
    """The official client beside a server process, and nothing but tools."""
    source = str(Path(graft.__file__).parent.parent)
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "graft", "mcp", "--workspace", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": source},
    )
    off = ["transforms.fuse_swiglu.enabled=false", "transforms.merge_gate_up.enabled=false"]
    given = {"model": "tiny-llama", "dtype": "float32", "sets": off}

    async def work(client):
        async def call(tool, **arguments):
            found = (await client.call_tool(tool, arguments)).structured_content
            assert found["ok"], found["error"]
            text, offset = found["page"], found["next_offset"]
            while offset is not None:
                page = (
                    await client.call_tool("more", {"result": found["result"], "offset": offset})
                ).structured_content
                text, offset = text + page["page"], page["next_offset"]
            return found["data"] or json.loads(text)

        candidates = (await call("discover", **given))["candidates"]
        chosen = next(one for one in candidates if one["title"] == "silu → mul")
        package = {"name": "fuse_gate", "folder": "gate-fusions", "candidate": chosen["id"], "op": True}
        written = await call("new_transform", **package, **given)
        plugin = ["gate-fusions/src/gate_fusions/__init__.py"]
        checked = await call("check", transform="fuse_gate", note="note.md", plugins=plugin, **given)
        note = await client.read_resource("graft://workspace/note.md")
        return written, checked, note.contents[0].text

    with (tmp_path / "stderr.txt").open("w") as errors:  # that of the process may be a test's, and closed
        written, checked, note = with_client(stdio_client(server, errors), work)
    assert written["op"] == "gate" and checked["ok"] and checked["transforms"][0]["matches"] == 2
    assert note.startswith("# fuse_gate on tiny-llama: accepted")
