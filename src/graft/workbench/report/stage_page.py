"""A story of torch.compile as one HTML file: seven columns, in which a click follows one node from line to kernel."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from graft.stages.story import Story
from graft.workbench.report.page import check_output, environment, policy, read, safe_json, write_page
from graft.workbench.report.stage_columns import columns_of, stage_facts
from graft.workbench.stages.saved import open_story

STYLES = ("base.css", "stages.css")
SCRIPTS = ("dom.js", "theme.js", "highlight.js", "stages.js")


def write_stage_page(folder: Path, output: Path) -> Story:
    """Writes the page of a folder that `graft stages -o` wrote: whole, or not at all."""
    check_output(output)
    story = open_story(folder)
    write_page(output, render_stages(story))
    return story


def render_stages(story: Story) -> str:
    own = "\n".join(read("static", name) for name in SCRIPTS)
    scripts = [f"(() => {{\n'use strict';\n{own}\n}})();"]
    return (
        environment()
        .get_template("stages.html.j2")
        .render(
            story=story,
            facts=stage_facts(story),
            styles=Markup("\n".join(read("static", name) for name in STYLES)),
            scripts=[Markup(script) for script in scripts],
            policy=policy(scripts),
            columns=Markup(safe_json(columns_of(story).pack())),
        )
    )
