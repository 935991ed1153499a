"""Folders that vouch for themselves: damaged, foreign, replaced and hostile ones."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from graft.base import manifest as manifests
from graft.base.errors import ArtifactError
from graft.base.files import atomic_folder
from graft.base.manifest import MANIFEST, FolderKind, OpenFolder, checksum, is_marked, write_manifest

KIND = FolderKind("graft test", 3, "a test folder", "the test writes one", "write it again")


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "folder")


def write(path, text="hello"):
    (path / "inner").mkdir(parents=True)
    (path / "a.txt").write_text(text)
    (path / "inner" / "b.bin").write_bytes(bytes(range(256)) * 40)
    (path / "empty").touch()
    write_manifest(path, {"versions": {"graft": "9.9"}}, KIND)
    return path


def opened(path):
    folder = OpenFolder(path, KIND)
    try:
        return {name: folder.read(name) for name in folder.manifest["files"]}
    finally:
        folder.close()


def edit(folder, sign=True, **changes):
    content = json.loads((folder / MANIFEST).read_text()) | changes
    (folder / MANIFEST).write_text(json.dumps(content | {"sha256": checksum(content)} if sign else content))


def test_what_was_written_is_read(folder):
    assert opened(folder) == {"a.txt": b"hello", "inner/b.bin": bytes(range(256)) * 40, "empty": b""}
    assert is_marked(folder, KIND)


def test_large_files_are_checked_in_parts(folder, monkeypatch):
    monkeypatch.setattr(manifests, "PART", 1000)
    write_manifest(folder, {}, KIND)
    assert len(json.loads((folder / MANIFEST).read_text())["files"]["inner/b.bin"]["sha256"]) == 11
    assert opened(folder)["inner/b.bin"] == bytes(range(256)) * 40
    with (folder / "inner" / "b.bin").open("r+b") as file:
        file.seek(7777)
        file.write(b"?")
    with pytest.raises(ArtifactError, match=r"b\.bin: was changed"):
        opened(folder)


def truncate(folder):
    os.truncate(folder / "inner" / "b.bin", 100)


def lengthen(folder):
    with (folder / "a.txt").open("a") as file:
        file.write("more")


def alter(folder):
    (folder / "a.txt").write_text("hallo")


def take_away(folder):
    (folder / "a.txt").unlink()


def link_out(folder):
    (folder / "a.txt").unlink()
    (folder / "a.txt").symlink_to("/etc/hostname")


def reach_out(folder):
    files = json.loads((folder / MANIFEST).read_text())["files"]
    edit(folder, files={**files, "../outside": {"bytes": 1, "sha256": ["0"]}})


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (truncate, "truncated: 100 bytes instead of 10240"),
        (lengthen, "longer than it was"),
        (alter, r"a\.txt: was changed after it was saved"),
        (take_away, r"a\.txt: cannot be opened"),
        (link_out, "cannot be opened"),
        (reach_out, "not inside of the folder"),
        (lambda folder: edit(folder, sign=False, extra=1), "its checksum is another"),
        (lambda folder: edit(folder, format=2), "format 2 .saved by graft 9.9., but this graft reads 3; write"),
        (lambda folder: edit(folder, format=4), "update graft"),
        (lambda folder: edit(folder, kind="another"), "not the manifest of a test folder"),
        (lambda folder: (folder / MANIFEST).write_text("{"), "is damaged"),
        (lambda folder: (folder / MANIFEST).write_text("[]"), "not the manifest"),
        (lambda folder: (folder / MANIFEST).write_bytes(b"\xff\xfe"), "is damaged"),
        (lambda folder: (folder / MANIFEST).unlink(), "has no manifest.json"),
        (shutil.rmtree, "does not exist; the test writes one"),
    ],
)  # fmt: skip
def test_damage_is_told_by_file(folder, damage, told):
    damage(folder)
    with pytest.raises(ArtifactError, match=told):
        opened(folder)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match="is a file"):
        opened(tmp_path / "file")


def test_a_folder_that_is_replaced_while_it_is_read_stays_as_it_was(folder, tmp_path):
    reader = OpenFolder(folder, KIND)
    with atomic_folder(folder) as fresh:
        fresh.rmdir()
        write(fresh, "another")
    assert reader.read("a.txt") == b"hello"
    reader.close()
    assert opened(folder)["a.txt"] == b"another"


def test_one_that_is_replaced_while_it_is_opened_is_opened_again(folder, monkeypatch):
    whole, calls = OpenFolder.open_file, []

    def replacing(self, name, size):
        calls.append(name)
        if len(calls) == 1:
            with atomic_folder(folder) as fresh:
                fresh.rmdir()
                write(fresh, "another, and longer")
        whole(self, name, size)

    monkeypatch.setattr(OpenFolder, "open_file", replacing)
    assert opened(folder)["a.txt"] == b"another, and longer"
    assert len(calls) == 4  # one that was another's, then all three


def test_two_processes_that_write_one_folder_each_put_a_whole_one_there(tmp_path):
    """The second comes while the first writes; without leave to replace it, the first is then refused."""
    target = tmp_path / "folder"

    def refuse():
        if target.exists():
            raise ArtifactError(target, "is there already")

    with pytest.raises(ArtifactError, match="already"), atomic_folder(target, refuse) as first:
        first.rmdir()
        write(first, "first")
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with atomic_folder(target, refuse) as second:
                    second.rmdir()
                    write(second, "second")
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
    assert opened(target)["a.txt"] == b"second" and [path.name for path in tmp_path.iterdir()] == ["folder"]
