"""Stories on disk: story.json, and the graphs and kernels as files to read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from graft.base.errors import DumpError
from graft.base.files import write_together
from graft.stages.story import Story
from graft.workbench.stages.text import node_line

FILE = "story.json"
FORMAT = 2


def is_story(path: str) -> bool:
    return Path(path).is_dir() and (Path(path) / FILE).is_file()


def save_story(story: Story, folder: Path) -> None:
    """All files, or none."""
    files = {folder / FILE: story_text(story)}
    whole, apart = story.functional.whole, story.functional.graphs
    stops = {
        "1_dynamo": story.dynamo.graphs,
        "2_whole": whole,
        "2_functional": apart,
        "3_post_grad": story.post_grad.graphs,
    }
    for stop, graphs in stops.items():
        for graph in graphs:
            files[folder / "graphs" / f"{file_name(graph.graph)}_{stop}.txt"] = graph.text
    for graph in dict.fromkeys(node.graph for node in story.scheduling.nodes):
        lines = [node_line(node) for node in story.scheduling.nodes if node.graph == graph]
        files[folder / "graphs" / f"{file_name(graph)}_4_ir.txt"] = "\n".join(lines) + "\n"
    for kernel in story.kernels.kernels:
        if kernel.source:
            suffix = "cpp" if kernel.language.startswith("cpp") else "py"
            files[folder / "kernels" / f"{file_name(kernel.graph)}_{kernel.name}.{suffix}"] = kernel.source
    for graph, code in story.kernels.code.items():
        files[folder / "code" / f"{file_name(graph)}.py"] = code
    write_together(files)


def story_text(story: Any) -> str:
    return json.dumps({"format": FORMAT, **story.to_dict()}, indent=1) + "\n"


def file_name(graph: str) -> str:
    return re.sub(r"\W", "_", graph) or "graph"


def open_story(folder: str | Path) -> Story:
    path = Path(folder) / FILE
    if not path.is_file():
        raise DumpError(f"{folder} has no {FILE}; graft stages TARGET -o DIR writes one")
    try:
        data = json.loads(path.read_text())
        if data.pop("format", None) != FORMAT:
            raise DumpError(f"{path} is of another version of graft; run graft stages TARGET -o DIR again")
        return Story.from_dict(data)
    except (ValueError, TypeError, AttributeError) as error:
        raise DumpError(f"{path} is no story: {error}") from error
