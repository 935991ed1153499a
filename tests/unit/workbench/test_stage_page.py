"""The page of a story: items of seven columns, links between them, all escaped, whole or not at all."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from graft.cli.app import app
from graft.stages.story import Refusal, ScheduledNode, StoryEnd
from graft.workbench.report.stage_columns import Columns, columns_of, is_about, layer_of, stage_facts
from graft.workbench.report.stage_page import render_stages
from graft.workbench.stages.saved import save_story
from stage_stories import step


def reached(columns: Columns, start: int, *, back: bool = False) -> set[int]:
    """As the page's click does it."""
    links = [(b, a) for a, b in columns.links] if back else list(columns.links)
    found, todo = set(), [start]
    while todo:
        at = todo.pop()
        new = {after for before, after in links if before == at} - found
        found |= new
        todo += new
    return found


def names(columns: Columns, numbers: set[int], column: int) -> set[str]:
    return {columns.items[n].name for n in numbers if columns.items[n].column == column}


def item(columns: Columns, column: int, text: str) -> int:
    return next(one.number for one in columns.items if one.column == column and text in (one.name, one.text))


def test_a_node_is_followed_forwards_to_its_kernel_and_backwards_to_its_line():
    columns = columns_of(step())
    after = reached(columns, item(columns, 1, "torch.nn.functional.silu"))
    assert names(columns, after, 2) == names(columns, after, 3) == {"%neg", "%exp", "%add", "%div"}
    (kernel,) = names(columns, after, 5)
    assert "silu" in kernel and names(columns, after, 6) and names(columns, after, 7) >= {"fx_graph"}
    before = reached(columns, item(columns, 5, "extern_kernels.mm"), back=True)
    assert names(columns, before, 3) == {"%mm"}
    (line,) = {columns.items[n].line for n in before if columns.items[n].column == 1}
    assert step().dynamo.lines[line] == "y = h @ w"


def test_what_a_pass_took_away_ends_in_its_column():
    columns = columns_of(step())
    view = next(one for one in columns.items if one.column == 1 and one.text == "view")
    after = reached(columns, view.number)
    assert names(columns, after, 2) and not names(columns, after, 3) and not names(columns, after, 5)


def test_every_item_of_a_later_graph_comes_from_somewhere():
    columns = columns_of(step())
    linked = {after for _, after in columns.links}
    assert {one.column for one in columns.items} == set(range(1, 8))
    assert all(one.number in linked for one in columns.items if one.column > 1)
    assert all(columns.items[a].column < columns.items[b].column for a, b in columns.links)


@pytest.mark.parametrize(("module", "layer"), [("model.layers.3.mlp", "layers.3"), ("model.norm", ""), ("", "")])
def test_layers_of_modules(module, layer):
    assert layer_of(module) == layer


def test_facts_are_those_of_the_text():
    facts = stage_facts(step())
    assert [one["number"] for one in facts] == list(range(1, 8)) and "no graph breaks" in facts[0]["lines"]


def test_names_are_escaped():
    evil = "</script><img src=x onerror=alert(1)>"
    told = replace(step(), target=evil, end=StoryEnd(3, evil, evil), notes=(evil,))
    page = render_stages(told)
    assert "<img" not in page and "&lt;img" in page
    kernel = replace(step().kernels.kernels[0], name=evil, source=evil)
    page = render_stages(replace(step(), kernels=replace(step().kernels, kernels=(kernel,))))
    assert "<img" not in page and page.count("</script>") == 2


def test_a_story_is_written_as_a_page(tmp_path):
    save_story(step(), tmp_path / "story")
    file = tmp_path / "page.html"
    run = CliRunner().invoke(app, ["report", str(tmp_path / "story"), "-o", str(file), "--json"])
    assert run.exit_code == 0 and json.loads(run.output)["bytes"] == file.stat().st_size
    text = file.read_text()
    assert "<b>7</b> caches" in text and "src=" not in text and 'href="#' in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-o", "."), "is a folder; name a file"),
        (("-o", "nowhere/page.html"), "does not exist"),
        (("--kernels", "x.json"), "--kernels is for the report of a run"),
    ],
)
def test_bad_requests_end_in_one_line(tmp_path, words, message):
    save_story(step(), tmp_path)
    result = CliRunner().invoke(app, ["report", str(tmp_path), *words])
    assert (
        result.exit_code in (1, 2) and message in " ".join(result.output.split()) and "Traceback" not in result.output
    )


def test_a_pair_of_a_branch_is_shown_at_its_nodes():
    node = ScheduledNode("0/0", "true_graph_0_op1", "Pointwise", ("sin",), "true_graph_0_op1")
    pair = Refusal("0/0", "true_graph_0_op0_true_graph_0_op1", "true_graph_0_op2", "no shared data")
    assert is_about(pair, node) and not is_about(pair, replace(node, name="op1"))
