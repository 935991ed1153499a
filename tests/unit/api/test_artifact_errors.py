"""Saved modules that are not whole, not ours, or not for this place: each is refused with what to do."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch import nn

import graft
from graft.api.artifact import Artifact, SavedGraph, load, read_artifact, save, write_artifact
from graft.api.artifact.format import MODULE, file_names
from graft.base import files
from graft.base.errors import ArtifactError, CaptureError, DiskFull, DumpError
from graft.base.files import atomic_folder
from graft.base.manifest import MANIFEST, checksum, fingerprint
from graft.ir.io.serial import graph_from_json, graph_to_json
from graft.ir.program.signature import Signature
from graft.ir.trace import export_graph
from graft.weights.named_tensors import pack


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        self.count.add_(x)
        return x * self.weight + self.count


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("artifact") / "saved"
    graft.compile(Counter(), (torch.ones(3),)).save(path)
    return path


@pytest.fixture
def saved(original, tmp_path):
    return shutil.copytree(original, tmp_path / "saved")


def captured():
    return artifact_of(Counter(), (torch.ones(3),))


def artifact_of(module, args):
    return Artifact((SavedGraph(export_graph(module, args), Signature(())),))


def edit_manifest(folder, sign=True, **changes):
    """Changes the manifest; `sign` renews its checksum, as a graft of another format would have written it."""
    manifest = json.loads((folder / MANIFEST).read_text()) | changes
    manifest["sha256"] = checksum(manifest) if sign else manifest["sha256"]
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", [MANIFEST, *file_names(1)])
@pytest.mark.parametrize("place", [0.0, 0.3, 0.6, 1.0])
def test_one_changed_byte_is_an_error_that_names_the_file(saved, name, place):
    graft.load(saved)
    data = bytearray((saved / name).read_bytes())
    data[int(place * (len(data) - 1))] ^= 0x01
    (saved / name).write_bytes(bytes(data))
    with pytest.raises(ArtifactError, match=name) as caught:
        graft.load(saved)
    assert "again" in str(caught.value) or "damaged" in str(caught.value)


@pytest.mark.parametrize("name", [MANIFEST, *file_names(1)])
def test_truncated_longer_and_missing_files(saved, name):
    data = (saved / name).read_bytes()
    (saved / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(ArtifactError, match=f"{name}: (is truncated|is damaged)"):
        graft.load(saved)
    (saved / name).write_bytes(data + b"x")
    with pytest.raises(ArtifactError, match=f"{name}: (is longer|is damaged)"):
        graft.load(saved)
    (saved / name).unlink()
    with pytest.raises(ArtifactError, match=f"{name}: cannot be opened|has no {name}"):
        graft.load(saved)


def test_files_that_are_links_are_not_followed(saved, tmp_path):
    (saved / "graph.json").rename(tmp_path / "elsewhere.json")
    (saved / "graph.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(ArtifactError, match=r"graph\.json: cannot be opened \(it is a link"):
        graft.load(saved)


def test_weights_of_another_module_are_an_error(saved, tmp_path):
    graft.compile(Counter(), (torch.ones(3),)).save(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "weights.safetensors", saved / "weights.safetensors")
    with pytest.raises(ArtifactError, match=r"weights\.safetensors: was changed after it was saved"):
        graft.load(saved)


def test_another_format_version_says_what_to_do(saved):
    edit_manifest(saved, format=0, versions={"graft": "0.0.1", "torch": "2.11"})
    with pytest.raises(ArtifactError, match=r"format 0 \(saved by graft 0\.0\.1\).*save it again with this graft"):
        graft.load(saved)
    edit_manifest(saved, format=999, versions={"graft": "9.0", "torch": "3"}, unheard_of={})
    with pytest.raises(ArtifactError, match=rf"format 999 .*this graft reads {MODULE.format}; update graft"):
        graft.load(saved)
    edit_manifest(saved, format="x")
    with pytest.raises(ArtifactError, match="format x"):
        graft.load(saved)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs a path of an open file")
def test_a_module_that_is_replaced_while_it_is_read_is_one_or_the_other(saved, monkeypatch):
    """Graphs, weights and state of the folder that was opened."""
    before, opened = graft.load(saved), load.OpenFolder

    class Replaced(opened):
        def __init__(self, path, kind):
            super().__init__(path, kind)
            graft.compile(Counter(), (torch.ones(3),)).save(path, overwrite=True)

    monkeypatch.setattr(load, "OpenFolder", Replaced)
    while_replaced = graft.load(saved)
    monkeypatch.undo()
    weight = before.graph_module.weight
    assert torch.equal(while_replaced.graph_module.weight, weight)
    assert not torch.equal(graft.load(saved).graph_module.weight, weight)


def test_a_manifest_with_a_wrong_hash(saved):
    files = json.loads((saved / MANIFEST).read_text())["files"]
    files["graph.json"]["sha256"] = ["0" * 64]
    edit_manifest(saved, sign=False, files=files)
    with pytest.raises(ArtifactError, match=r"manifest\.json: was changed after"):
        graft.load(saved)
    edit_manifest(saved, files=files)
    with pytest.raises(ArtifactError, match=r"graph\.json: was changed after"):
        graft.load(saved)


def test_paths_that_are_no_saved_module(tmp_path):
    with pytest.raises(ArtifactError, match="does not exist"):
        graft.load(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match="is a file, but a saved module is a folder"):
        graft.load(tmp_path / "file")
    with pytest.raises(ArtifactError, match=r"has no manifest\.json"):
        graft.load(tmp_path)
    for text in ("[1]", "{}", '{"kind": "other"}'):
        (tmp_path / MANIFEST).write_text(text)
        with pytest.raises(ArtifactError, match="not the manifest of a saved module"):
            graft.load(tmp_path)


def test_another_torch_is_a_note_in_the_report(saved):
    assert not any("torch" in note for note in graft.load(saved).report.notes)
    edit_manifest(saved, versions={"graft": "0.1.0", "torch": "2.0.1", "python": "3.11"})
    loaded = graft.load(saved)
    assert [n for n in loaded.report.notes if n.startswith("saved with torch 2.0.1, loaded with")]
    assert torch.equal(loaded(torch.zeros(3)), torch.zeros(3))


def test_a_device_that_is_not_here(saved):
    edit_manifest(saved, devices=["cpu", "cuda:97"])
    with pytest.raises(ArtifactError, match=r"saved for the device cuda:97, but cuda has \d+ devices here"):
        graft.load(saved)


def test_an_op_that_is_not_here(saved):
    text = (saved / "graph.json").read_text().replace("torch.ops.aten.mul.Tensor", "torch.ops.other.mul.Tensor")
    (saved / "graph.json").write_text(text)
    files = json.loads((saved / MANIFEST).read_text())["files"]
    edit_manifest(saved, files=files | {"graph.json": fingerprint(saved / "graph.json")})
    with pytest.raises(
        ArtifactError, match=r"calls other\.mul\.Tensor, which is not registered here; install the package"
    ):
        graft.load(saved)


def folder_content(path):
    return sorted(str(p.relative_to(path)) for p in path.rglob("*"))


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device"), OSError(5, "io")]
)
def test_an_interrupted_save_leaves_nothing_and_keeps_what_was_there(tmp_path, monkeypatch, error):
    def broken(path, tensors):
        path.write_bytes(b"half")
        raise error

    write_artifact(tmp_path / "kept", captured())
    before = folder_content(tmp_path)
    monkeypatch.setattr(save, "save_tensors", broken)
    expected = {KeyboardInterrupt: KeyboardInterrupt}.get(
        type(error), DiskFull if error.args[:1] == (28,) else ArtifactError
    )
    for name, overwrite in (("new", False), ("kept", True)):
        with pytest.raises(expected):
            write_artifact(tmp_path / name, captured(), overwrite=overwrite)
        assert folder_content(tmp_path) == before
    read_artifact(tmp_path / "kept")


def test_a_folder_that_cannot_take_its_place_leaves_the_old_one(tmp_path, monkeypatch):
    target = tmp_path / "saved"
    target.mkdir()
    (target / "old").write_text("old")
    rename = Path.rename

    def refuses(path, to):
        if path.name.endswith(".partial"):
            raise OSError("no")
        return rename(path, to)

    monkeypatch.setattr(files, "exchanged", lambda one, other: False)  # as where the system cannot
    monkeypatch.setattr(Path, "rename", refuses)
    with pytest.raises(OSError, match="no"), atomic_folder(target) as folder:
        (folder / "new").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"] and (target / "old").read_text() == "old"


def test_what_is_in_the_way_is_not_overwritten(tmp_path):
    artifact = captured()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ArtifactError, match="is a file"):
        write_artifact(tmp_path / "file", artifact, overwrite=True)
    with pytest.raises(ArtifactError, match=r"cannot be written: .*(exists|Not a directory)"):
        write_artifact(tmp_path / "file" / "below", artifact)
    (tmp_path / "mine").mkdir()
    write_artifact(tmp_path / "mine", artifact)  # an empty folder is free
    with pytest.raises(ArtifactError, match="holds a saved module already; pass overwrite=True"):
        write_artifact(tmp_path / "mine", artifact)
    write_artifact(tmp_path / "mine", artifact, overwrite=True)
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ArtifactError, match=r"files that graft did not write, for example notes\.txt"):
        write_artifact(tmp_path / "mine", artifact, overwrite=True)
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / MANIFEST).write_text('{"name": "a web page"}')
    with pytest.raises(ArtifactError, match="files that graft did not write"):
        write_artifact(tmp_path / "web", artifact, overwrite=True)
    assert (tmp_path / "web" / MANIFEST).read_text() == '{"name": "a web page"}'


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder where nobody may write")
def test_a_folder_where_nobody_may_write():
    with pytest.raises(ArtifactError, match="cannot be written: "):
        write_artifact("/proc/graft/saved", captured())
    with pytest.raises((ArtifactError, DiskFull), match="graft"):
        write_artifact("/proc/graft", captured())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(ArtifactError, match=r"cannot be written: .*Permission denied"):
        write_artifact(tmp_path / "locked" / "saved", captured())


def test_what_cannot_be_stored_is_refused_before_anything_is_written(tmp_path):
    pair = namedtuple("pair", "a b")

    class Named(nn.Module):
        def forward(self, x):
            return pair(x + 1, x)

    with pytest.raises(ArtifactError, match="cannot be written: pair cannot be found by its name"):
        graft.compile(Named(), (torch.ones(2),)).save(tmp_path / "a")

    class Samples(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator = torch.Generator()

        def forward(self, x):
            return x + torch.rand(2, generator=self.generator)

    refused = r"cannot be written: %.* reads self\..*, which is not a tensor|not capture .*Generator"  # torch 2.11's
    with pytest.raises((ArtifactError, CaptureError), match=refused):
        write_artifact(tmp_path / "b", artifact_of(Samples(), (torch.ones(2),)))
    gm = export_graph(Counter(), (torch.ones(3),))
    gm.register_buffer("bytes", gm.weight.detach().view(torch.int32)[:2])
    with pytest.raises(DumpError, match="share memory under different dtypes"):
        pack([gm])
    with pytest.raises(ArtifactError, match=r"cannot be written: .*meta"):
        write_artifact(tmp_path / "c", artifact_of(Counter().to("meta"), (torch.ones(3, device="meta"),)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["nodes"][2].update(target="x, y=print('run')"), "where a name must stand"),
        (lambda d: d["nodes"][0].update(target='weight"+print("run")+"'), "where a name must stand"),
        (lambda d: d["nesting"].update(names=["x=print('run')"]), "not all names"),
        (lambda d: d["nodes"][-2].update(target="_operator.call"), r"calls _operator\.call, which is neither"),
        (lambda d: d["nodes"][-2].update(target="os.system"), r"calls os\.system, which is neither"),
        (lambda d: d["nodes"][2]["val"]["tensor"].update(shape=["print('run')"]), "cannot be read"),
        (lambda d: d["nodes"][2]["val"]["tensor"].update(dtype="no_such"), "no_such"),
    ],
)
def test_a_stored_graph_runs_no_code_when_it_is_read(capsys, change, message):
    data = json.loads(graph_to_json(captured().graphs[0].graph_module, exact=True))
    assert [node["op"] for node in data["nodes"][:3]] == ["get_attr", "get_attr", "placeholder"]
    change(data)
    with pytest.raises(DumpError, match=message):
        graph_from_json(json.dumps(data))
    assert capsys.readouterr().out == ""
