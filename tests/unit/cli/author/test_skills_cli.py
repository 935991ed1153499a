"""`graft skills`: listed, shown, copied; what a wheel has; what is refused."""

from __future__ import annotations

import json
import re
import shlex
import zipfile
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from graft.base.errors import SkillError
from graft.cli.app import app
from graft.workbench import skills
from graft.workbench.skills import all_skills, install_skills, read_skill
from tutorial_runner import FENCED, NEEDS, blocks

ROOT = Path(__file__).parents[4]
NAMES = [
    "add-fusion", "contribute", "debug-a-drift", "deploy-and-serve", "explore-the-codebase", "find-candidates",
    "graph-dump", "review-a-fusion", "stage-lab", "tune-a-triton-kernel", "write-a-cuda-kernel",
    "write-native-kernel", "write-triton-kernel",
]  # fmt: skip
PARTS = ("Inputs", "Outputs", "Steps", "Guard rails", "When something fails")


def graft(*args, code=0):
    done = CliRunner().invoke(app, ["skills", *map(str, args)])
    assert done.exit_code == code and isinstance(done.exception, SystemExit | None), done.output
    return done


def test_every_skill_is_listed_with_its_description():
    lines = graft("list").stdout.splitlines()
    # a description goes on in lines that begin with blanks, however wide the console was when it was made
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == ["skill", *NAMES]
    rows = json.loads(graft("list", "--json").stdout)["items"]
    assert [row["name"] for row in rows] == NAMES and all(Path(row["path"]).is_file() for row in rows)


def test_one_is_shown_as_it_is():
    file = ROOT / "skills" / "graph-dump" / "SKILL.md"
    assert graft("show", "graph-dump").stdout == file.read_text()
    shown = json.loads(graft("show", "graph-dump", "--json").stdout)
    assert shown["text"] == file.read_text() and shown["name"] == "graph-dump" and shown["path"] == str(file)


def test_an_unknown_one_has_near_names():
    said = graft("show", "graph-dmup", code=2).stderr
    assert said.startswith("graft: error: unknown skill 'graph-dmup'; did you mean 'graph-dump'")
    assert said.count("\n") == 1


def test_they_are_copied_once_and_other_files_stay(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "SKILL.md").write_text("mine")
    lines = graft("install", tmp_path).stdout.splitlines()
    assert lines[0] == "  new      add-fusion/SKILL.md" and lines[-1] == f"{len(NAMES)} skills in {tmp_path}"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*NAMES, "mine"])
    for name in NAMES:
        assert (tmp_path / name / "SKILL.md").read_text() == (ROOT / "skills" / name / "SKILL.md").read_text()
    again = json.loads(graft("install", tmp_path, "--json").stdout)
    assert {file["status"] for file in again["files"]} == {"same"} and len(again["files"]) == len(NAMES)
    assert (tmp_path / "mine" / "SKILL.md").read_text() == "mine"


def test_what_was_changed_there_is_replaced_by_force_alone(tmp_path):
    changed = tmp_path / "contribute" / "SKILL.md"
    changed.parent.mkdir()
    changed.write_text("ours says more")
    said = graft("install", tmp_path, code=2).stderr
    assert f"{tmp_path} has other files where skills go: contribute/SKILL.md; nothing was written" in said
    assert [path.name for path in tmp_path.iterdir()] == ["contribute"] and changed.read_text() == "ours says more"
    assert "  replaced contribute/SKILL.md\n" in graft("install", tmp_path, "--force").stdout
    assert changed.read_text() == (ROOT / "skills" / "contribute" / "SKILL.md").read_text()


@pytest.mark.parametrize("inside", ["file", "file/deeper/skills"])
def test_a_folder_that_cannot_be_written_is_an_error(tmp_path, inside):
    (tmp_path / "file").write_text("a file")
    said = graft("install", tmp_path / inside, code=1).stderr
    assert "failed: " in said and "cannot be written: choose another" in said and said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_system_that_refuses_is_an_error():
    said = graft("install", "/proc/skills/here", code=1).stderr
    assert "cannot be written: choose another" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("# no head\n", "does not begin with front matter"),
        ("---\nname: one\n", "does not begin with front matter"),
        ("---\nname: [one\n---\n", "is not YAML"),
        ("---\nname: two\ndescription: x\n---\n", "needs name: one and a description"),
        ("---\nname: one\n---\n", "needs name: one and a description"),
    ],
)
def test_front_matter_that_agents_cannot_read_is_found(tmp_path, text, problem):
    file = tmp_path / "one" / "SKILL.md"
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(SkillError, match=problem):
        read_skill(file)


def test_an_installation_without_skills_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(skills, "HOMES", (tmp_path / "none",))
    with pytest.raises(SkillError, match="install graft again"):
        install_skills(tmp_path)


@pytest.mark.parametrize("skill", all_skills(), ids=lambda skill: skill.name)
def test_a_skill_has_all_parts_and_is_short(skill):
    """Limits that agents hold a skill to: 64 characters of name, 1,024 of description, 500 lines."""
    assert len(skill.name) <= 64 and len(skill.description) <= 1024 and skill.text.count("\n") < 500
    lines = FENCED.sub("", skill.text).splitlines()
    headings = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
    assert headings == list(PARTS)
    assert any(block.kind == "bash" for block in blocks(skill.path))


@pytest.mark.parametrize("skill", all_skills(), ids=lambda skill: skill.name)
def test_every_command_of_a_skill_has_options_that_exist(skill):
    """Those that need a GPU or a server as well: parsed, not run."""
    for block in blocks(skill.path):
        words = {word for word in block.words if not word.startswith("exit=")}
        assert words <= {*NEEDS, "background"}, words
        for command in block.commands if block.kind == "bash" else ():
            if command.startswith("graft "):
                parse(shlex.split(command.split(" > ")[0].split(" | ")[0].removesuffix("&"))[1:])


def parse(words: list[str]) -> None:
    command = typer.main.get_command(app)
    context = command.make_context("graft", [*words])
    name, found, rest = command.resolve_command(context, [*words])
    if name in ("stages", "skills"):
        name, found, rest = found.resolve_command(found.make_context(name, [*rest]), [*rest])
    found.make_context(name, rest)


def options(command=None) -> set[str]:
    """Of all verbs, as they are written."""
    command = command or typer.main.get_command(app)
    own = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return own.union(*map(options, getattr(command, "commands", {}).values()))


@pytest.mark.parametrize(
    "page", [*(skill.path for skill in all_skills()), ROOT / "AGENTS.md"], ids=lambda page: page.parent.stem
)
def test_options_that_the_text_names_exist(page):
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", FENCED.sub("", page.read_text())))
    assert named <= options() | {"--help"}


def test_an_option_that_is_not_there_is_found():
    with pytest.raises(Exception, match="--nowhere"):
        parse(["dump", "tiny-llama", "-o", "run", "--nowhere"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["standard", "editable"])
def test_the_wheel_has_them_and_an_editable_install_reads_the_checkout(tmp_path, kind):
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    (wheel,) = builder.build(directory=str(tmp_path), versions=[kind])
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.endswith("SKILL.md")}
    assert packed == ({f"graft/skills/{name}/SKILL.md" for name in NAMES} if kind == "standard" else set())
