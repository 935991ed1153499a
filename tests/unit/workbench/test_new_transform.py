"""graft new-transform: what it writes where, and that what it refuses leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from graft.base.errors import DiskFull, PatternError, UsageError
from graft.base.files import write_together
from graft.cli.app import app
from graft.workbench.scaffold.body import read_shapes
from graft.workbench.scaffold.destination import Destination
from graft.workbench.scaffold.names import check_name
from graft.workbench.scaffold.plan import new_transform, with_entry
from scaffold_cases import ROOT, SOURCE, checkout_folder, functions_file  # noqa: F401  (fixtures)


def tree(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run_ruff(folder, *args):
    return subprocess.run(
        [sys.executable, "-m", "ruff", *args, "."], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.exhaustive
def test_generated_files_are_formatted_and_lint_free(checkout, functions):
    pytest.importorskip("ruff", reason="ruff is not installed here")
    new_transform("fuse_plain", checkout, op=True)
    new_transform("fuse_other", checkout, pattern=f"{functions}:norm", replacement=f"{functions}:known")
    for command in (["check"], ["format", "--check"]):
        done = run_ruff(checkout, *command)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_listed_transform_is_not_listed_twice():
    text = "transforms:\n  a:  {stage: match, enabled: true}  # why\n  b: {stage: fuse, enabled: true}\n"
    once = with_entry(text, "c", "match")
    assert once.splitlines()[2] == "  c:                   {stage: match, enabled: false}"
    assert with_entry(once, "c", "match") == once


def test_where_the_files_go(tmp_path, monkeypatch):
    monkeypatch.chdir(SOURCE / "graft" / "cli")
    assert Destination.of(None) == Destination.of(ROOT) == Destination(ROOT.resolve(), True)
    assert Destination.of(Path("here")) == Destination((SOURCE / "graft" / "cli" / "here").resolve(), False)
    monkeypatch.chdir(tmp_path)
    assert Destination.of(None) == Destination(tmp_path.resolve(), False)


# ── refusals ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("FuseThis", "snake_case"),
        ("fuse-this", "snake_case"),
        ("fuse__this", "snake_case"),
        ("_fuse", "snake_case"),
        ("fuse_", "snake_case"),
        ("2fuse", "snake_case"),
        ("", "snake_case"),
        ("../fuse", "snake_case"),
        ("class", "snake_case"),
        ("fuse_é", "snake_case"),
        ("test_fuse", "pytest would take"),
        ("fuse_rope", "is there already"),
        ("json", "another Python module"),
    ],
)
def test_bad_names_are_refused_and_nothing_is_written(tmp_path, name, message):
    with pytest.raises(UsageError, match=message):
        new_transform(name, tmp_path)
    assert not tree(tmp_path)


@given(st.text(max_size=12))
def test_a_name_is_an_identifier_or_refused(name):
    try:
        check_name(name)
    except UsageError as error:
        assert "choose" in str(error) or "snake_case" in str(error)
    else:
        assert name.isidentifier() and name == name.lower() and name.isascii() and "__" not in name


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"op": True, "name": "fuse_rms_norm_2", "stage": "later"},
            UsageError,
            "match, shard, fuse, state, schedule",
        ),
        ({"op": True, "name": "fuse_on_cuda"}, UsageError, "ops carry no backend"),
        ({"op": True, "name": "fuse_x"}, UsageError, "its own files use for something else"),
        ({"op": True, "name": "fuse_define"}, UsageError, "its own files use for something else"),
        ({"op": True, "name": "swiglu"}, UsageError, "an op graft::swiglu is there already"),
        ({"replacement": "{f}:known"}, UsageError, "--replacement needs --pattern"),
        ({"pattern": "{f}:norm"}, UsageError, "either --replacement FILE.py:function, or --op"),
        ({"pattern": "{f}:norm", "replacement": "{f}:known", "op": True}, UsageError, "either --replacement"),
        ({"pattern": "{f}", "op": True}, UsageError, "write FILE.py:function"),
        ({"pattern": "{f}x.py:norm", "op": True}, UsageError, "cannot be read: No such file"),
        ({"pattern": "{f}:nrm", "op": True}, UsageError, "no function 'nrm' at its top level; it has norm, known"),
        ({"pattern": "{f}:scaled", "op": True}, UsageError, "uses SCALE of its file; write it inside the function"),
        ({"pattern": "{f}:norm", "replacement": "{f}:swapped"}, PatternError, "both need the same arguments"),
        ({"pattern": "{f}:norm", "replacement": "{f}:norm"}, UsageError, "both named norm; rename one"),
        ({"pattern": "{f}:norm", "replacement": "{f}:off"}, PatternError, "it fused, and the graph gives"),
        ({"pattern": "{f}:branching", "op": True}, PatternError, "cannot be traced"),
        ({"shapes": "x: b s d"}, UsageError, "--shapes needs --pattern"),
        ({"pattern": "{f}:projected", "op": True}, PatternError, r"mine.py:\d+, in projected.* --shapes"),
        ({"pattern": "{f}:projected", "op": True, "shapes": "x: b s d"}, PatternError, "differ in w; every tensor"),
        ({"pattern": "{f}:projected", "op": True, "shapes": "x, w"}, UsageError, "is no argument with its sizes"),
        ({"pattern": "{f}:projected", "op": True, "shapes": "x: b d, x: n"}, UsageError, "x has two shapes"),
        ({"pattern": "{f}:projected", "op": True, "shapes": " , "}, UsageError, "--shapes is empty"),
        (
            {"pattern": "{f}:raising", "op": True},
            PatternError,
            r"list index out of range \(.*mine.py:\d+, in raising",
        ),
        ({"pattern": "{f}:written", "op": True}, PatternError, "ops that only read"),
        ({"pattern": "{f}:own_tensor", "op": True, "shapes": "x: b 2"}, PatternError, "take it as an argument"),
    ],
)
def test_bad_requests_are_refused_and_nothing_is_written(tmp_path, functions, options, error, message):
    folder = tmp_path / "plugins"
    given = {key: value.format(f=functions) if isinstance(value, str) else value for key, value in options.items()}
    with pytest.raises(error, match=message):
        new_transform(given.pop("name", "fuse_mine"), folder, **given)
    assert not folder.exists()


def test_a_file_that_is_not_python_is_told(tmp_path):
    (tmp_path / "bad.py").write_text("def f(x:\n")
    with pytest.raises(UsageError, match="is not Python"):
        new_transform("fuse_mine", tmp_path, op=True, pattern=f"{tmp_path / 'bad.py'}:f")


@pytest.mark.exhaustive
def test_why_no_kernel_was_generated_is_told(tmp_path, functions):
    made = new_transform("fuse_mine", tmp_path / "p", op=True, pattern=f"{functions}:norm")
    assert made.no_kernel == "" and "row_sum" in (tmp_path / "p" / "mine_op" / "native.h").read_text()
    made = new_transform("fuse_sorted", tmp_path / "p", op=True, pattern=f"{functions}:rolled")
    assert "which is not an op that can be generated" in made.no_kernel
    assert "kernels=" not in (tmp_path / "p" / "sorted_op" / "op.py").read_text()
    made = new_transform("fuse_power", tmp_path / "p", op=True, pattern=f"{functions}:repeated")
    assert made.no_kernel == "it takes whole numbers, which may be sizes"


def test_nothing_is_overwritten_without_force(tmp_path):
    new_transform("fuse_mine", tmp_path)
    (tmp_path / "fuse_mine.py").write_text("# mine\n")
    before = tree(tmp_path)
    with pytest.raises(UsageError, match=r"fuse_mine.py is there already; choose another name, or --force"):
        new_transform("fuse_mine", tmp_path)
    assert tree(tmp_path) == before
    new_transform("fuse_mine", tmp_path, force=True)
    assert "class FuseMine" in (tmp_path / "fuse_mine.py").read_text()
    with pytest.raises(UsageError, match="'fuse_rope' is there already"):  # not ours: no force makes it ours
        new_transform("fuse_rope", tmp_path, force=True)


@pytest.mark.parametrize("failing", range(4))
def test_a_failure_on_the_way_leaves_all_as_it_was(tmp_path, monkeypatch, failing):
    (tmp_path / "kept.txt").write_text("old")
    before, calls, replace = tree(tmp_path), [], Path.replace

    def fail(self, target):
        calls.append(target)
        if len(calls) == failing + 1:
            raise OSError(28, "No space left on device", str(target))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fail)
    files = {tmp_path / "kept.txt": "new", **{tmp_path / f"deep/{n}/{n}.py": n for n in "abc"}}
    with pytest.raises(DiskFull, match="nothing was left behind"):
        write_together(files)
    assert tree(tmp_path) == before and [p.name for p in tmp_path.iterdir()] == ["kept.txt"]
    monkeypatch.undo()
    write_together(files)
    assert {path: path.read_text() for path in files} == files and len(tree(tmp_path)) == 4


# ── packages ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_package_is_made_once_and_gets_more_transforms(tmp_path, functions):
    """The second adds its lines and changes nothing that its author may have changed."""
    place = Destination.in_package(tmp_path / "my-fusions")
    new_transform("fuse_mine", place)
    (place.root / "README.md").write_text("mine\n")
    made = new_transform("fuse_more", place, op=True, pattern=f"{functions}:capped", stage="fuse")
    assert {path.name for path in made.changed} == {"graft.yaml"} and made.package == "my_fusions"
    assert (place.root / "README.md").read_text() == "mine\n"
    listed = yaml.safe_load((place.source / "graft.yaml").read_text())
    assert listed["transforms"]["fuse_more"] == {"stage": "fuse", "enabled": False}
    assert list(listed["families"]["every"]["absent"]) == ["fuse_mine", "fuse_more"]
    project = tomllib.loads((place.root / "pyproject.toml").read_text())["project"]
    assert project["entry-points"] == {"graft.transforms": {"my-fusions": "my_fusions"}}
    assert "${{ matrix.python }}" in (place.root / ".github" / "workflows" / "tests.yml").read_text()
    for command in (["check"], ["format", "--check"]):
        done = run_ruff(place.root, *command)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("folder", "words"), [("json", "another Python package"), ("1st", "cannot be a package")])
def test_a_package_that_could_not_be_imported_is_refused(tmp_path, folder, words):
    with pytest.raises(UsageError, match=words):
        new_transform("fuse_mine", Destination.in_package(tmp_path / folder))
    assert not (tmp_path / folder).exists()


@given(
    names=st.lists(st.from_regex(r"[a-z]{1,6}", fullmatch=True), unique=True, min_size=1, max_size=4),
    dims=st.lists(st.lists(st.sampled_from("bsdn"), min_size=1, max_size=4), min_size=4, max_size=4),
    space=st.sampled_from(["", " ", "  "]),
)
def test_shapes_are_read_back(names, dims, space):
    wanted = {name: " ".join(sizes) for name, sizes in zip(names, dims, strict=False)}
    text = f",{space}".join(f"{name}{space}:{space}{sizes}" for name, sizes in wanted.items())
    assert read_shapes(text) == wanted
    assert read_shapes(f"{text}: int64")[names[-1]] == f"{wanted[names[-1]]}: int64"


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_command_says_what_it_wrote_and_what_comes_next(tmp_path):
    told = CliRunner().invoke(app, ["new-transform", "fuse_mine", "--dir", str(tmp_path)])
    assert told.exit_code == 0, told.output
    assert "new      fuse_mine.py" in told.output and "python -m pytest test_fuse_mine.py" in told.output
    assert "graft explain MODEL fuse_mine --plugin fuse_mine.py" in told.output
    told = CliRunner().invoke(app, ["new-transform", "fuse_more", "--op", "--dir", str(tmp_path), "--json"])
    document = json.loads(told.stdout)
    assert document["op"] == "more" and "more_op/triton.py" in document["files"] and not document["checkout"]


def test_the_command_refuses_with_one_line(tmp_path):
    told = CliRunner().invoke(app, ["new-transform", "Fuse", "--dir", str(tmp_path)])
    assert told.exit_code == 2 and told.stderr.startswith("graft: error: 'Fuse' cannot be a transform's name")
    assert told.stderr.count("\n") == 1 and not tree(tmp_path)
