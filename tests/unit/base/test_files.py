"""One way to write a file: whole or not at all, whatever interrupts it, and nothing stays beside it."""

from __future__ import annotations

import ast
import errno
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graft
from graft.base import files
from graft.base.errors import DiskFull, ReportError
from graft.base.files import (
    atomic_file,
    atomic_folder,
    disk_errors,
    exchanged,
    write_together,
    write_whole,
)
from graft.base.half_written import ABANDONED, machine, partial_path

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), FULL, ValueError("half")])
@pytest.mark.parametrize("before", [None, "old"])
def test_an_interrupted_write_leaves_the_old_file(tmp_path, error, before):
    target = tmp_path / "a.json"
    if before is not None:
        target.write_text(before)
    with pytest.raises(type(error)), atomic_file(target) as partial:
        partial.write_text("half of the n")
        raise error
    assert (target.read_text() if target.exists() else None) == before
    assert [path.name for path in tmp_path.iterdir()] == (["a.json"] if before else [])


@settings(deadline=None)
@given(st.binary(max_size=200), st.sampled_from(["a", "a.png", "a.b.json", ".hidden", "[x]*.txt"]))
def test_a_written_file_is_all_that_is_there(tmp_path_factory, content, name):
    folder = tmp_path_factory.mktemp("whole")
    target = folder / "deep" / name
    write_whole(target, content)
    assert target.read_bytes() == content and list(target.parent.iterdir()) == [target]
    assert partial_path(target).name.endswith(target.suffix)


def test_what_a_killed_process_left_goes_and_what_a_live_one_writes_stays(tmp_path):
    """A process of another machine, or another container, that shares the disk may have any number."""
    target, dead, there = tmp_path / "a.so", 999999999, machine()
    live = [f"{os.getppid()}", f"{os.getppid()}-{there}-7f", f"{dead}-0123abcd-7f", "of-a-user"]
    stale = [f"{dead}", f"{dead}-{there}-7f", f"{os.getppid()}-4567abcd-7f"]
    for writer in (*live, *stale):
        (tmp_path / f".a.{writer}.partial.so").write_text("half")
    days_ago = time.time() - 2 * ABANDONED
    os.utime(tmp_path / f".a.{stale[-1]}.partial.so", (days_ago, days_ago))
    write_whole(target, "new")
    assert {path.name for path in tmp_path.iterdir()} == {"a.so", *(f".a.{writer}.partial.so" for writer in live)}


def test_threads_that_write_the_same_file_do_not_meet(tmp_path):
    target, both = tmp_path / "a.txt", threading.Barrier(2, timeout=60)

    def write(text):
        with atomic_file(target) as partial:
            partial.write_text(text)
            both.wait()
            assert partial.read_text() == text
            both.wait()

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(write, ("one", "other"))] == [None, None]
    assert target.read_text() in ("one", "other") and [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_folder_takes_the_place_of_another(tmp_path, monkeypatch, at_once):
    """Where the system can do it, without a moment in which there is none."""
    one, other, target = (tmp_path / name for name in ("one", "other", "made"))
    if not at_once:
        monkeypatch.setattr(files, "exchanged", lambda one, other: False)
    with atomic_folder(target) as folder:
        (folder / "old").touch()
    one.mkdir()
    other.touch()
    if at_once and not exchanged(one, other):
        pytest.skip("this system, or this disk, cannot exchange two paths")
    assert one.is_file() == other.is_dir() == at_once
    monkeypatch.setattr(Path, "rename", None if at_once else Path.rename)
    with atomic_folder(target) as folder:
        (folder / "new").touch()
    assert [path.name for path in target.iterdir()] == ["new"] and len([*tmp_path.iterdir()]) == 3


@pytest.mark.parametrize("there", ["file/a.txt", "file/deep/a.txt"])
def test_files_that_cannot_all_be_written_leave_none(tmp_path, there):
    """A folder that cannot be made is an error of ours, and the folders that were made before are gone."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskFull, match="cannot be written: choose another"):
        write_together({tmp_path / "new" / "deep" / "b.txt": "b", tmp_path / there: "a"})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_full_disks_and_unwritable_folders_are_told_apart(tmp_path):
    target = tmp_path / "a.html"
    words = r"writing .*a\.html failed: .*No space left.*nothing was left behind.*Free space"
    with pytest.raises(DiskFull, match=words), disk_errors(target, lambda error: ReportError(str(error))):
        raise FULL
    with pytest.raises(ReportError, match="denied"), disk_errors(target, lambda error: ReportError(str(error))):
        raise PermissionError(errno.EACCES, "Permission denied")
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskFull, match=r"The folder cannot be written: choose another \(GRAFT_CACHE_DIR"):
        write_whole(tmp_path / "file" / "a.html", "text")


def test_nobody_else_puts_files_in_place():
    """`os.replace`, `Path.replace(path)` and temporary names are in base/files.py and base/half_written.py alone."""
    root = Path(graft.__file__).parent
    homes = {root / "base/files.py", root / "base/half_written.py"}
    for path in sorted(root.rglob("*.py")):
        text = path.read_text()
        if path in homes or not (".partial" in text or re.search(r"\bos\.replace|\.replace\(\s*\w+,?\s*\)", text)):
            continue  # no call that is looked for, formatted as ruff does
        for node in ast.walk(ast.parse(text)):
            named = isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith(".partial")
            assert not named, f"{path}: {ast.unparse(node)}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "replace":
                on = ast.unparse(node.func.value)
                assert on != "os" and not (
                    len(node.args) == 1 and isinstance(node.args[0], ast.Name) and not node.keywords
                ), f"{path}: {ast.unparse(node)}"
