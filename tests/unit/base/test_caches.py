"""graft's caches: listed, pruned, and carried from one place to another whole."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile

import pytest

from graft.base import cache_bundle, caches
from graft.base.cache_bundle import LIST, export_entries, import_bundle
from graft.base.caches import CHECKS, ENGINES, GRAPHS, KINDS, NATIVE, TUNED, all_entries, entries, prune
from graft.base.errors import ArtifactError
from graft.cli.app import app

OLD, NEW = 1_000_000, 2_000_000


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Caches with an entry of each kind that graft makes itself; the graph is old."""
    for kind in KINDS:
        if kind.variable:
            monkeypatch.delenv(kind.variable, raising=False)
    monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path / "home"))
    fill(tmp_path / "home")
    return tmp_path / "home"


def fill(home):
    manifest = {
        "model": {"name": "tiny", "dtype": "float32"},
        "quantized": None,
        "device": "cpu",
        "backend": "native",
    }
    texts = {
        "engines/abc/manifest.json": json.dumps(manifest),
        "engines/abc/native/step.so": "code",
        "graphs/g1.json": json.dumps({"graft_graph": "g1", "about": "LlamaForCausalLM"}) + "\n{}",
        "native/n1.cpp": "// Kernels of graphs.\n",
        "native/n1.so": "code",
        "native/n1.lock": "",
        "native/n2.so": "code",
        "checks/c1.json": '{}\n{"trials": 3, "error": 0.5, "limit": 1.0, "inputs": "moderate"}',
        "tuned/H200.json": "{}",
    }
    for name, text in texts.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    for path in home.rglob("*"):
        os.utime(path, (NEW, NEW))
    os.utime(home / "graphs" / "g1.json", (OLD, OLD))


def files(home):
    return {p.relative_to(home).as_posix(): p.read_bytes() for p in home.rglob("*") if p.is_file()}


def test_entries_say_what_they_are_for(home):
    found = {(one.kind.name, one.name): one for one in all_entries()}
    assert {key: one.about for key, one in found.items()} == {
        ("engines", "abc"): "tiny, float32, cpu (native)",
        ("graphs", "g1"): "LlamaForCausalLM",
        ("native", "n1"): "kernels that steps share",
        ("native", "n2"): "compiled C++",
        ("checks", "c1"): "3 trials, worst 5.0e-01 of 1.0e+00: moderate",
        ("tuned", "H200"): "H200",
    }
    assert found["native", "n1"].bytes == len("// Kernels of graphs.\n") + len("code")
    (home / "engines" / "abc" / "manifest.json").write_text("half")
    assert entries(ENGINES)[0].about == "damaged, or of another graft"


def test_hidden_files_and_links_are_no_entries(home, tmp_path):
    (home / "graphs" / ".g2.123.partial.json").write_text("half")
    (home / "graphs" / "link.json").symlink_to(tmp_path / "elsewhere")
    assert [one.name for one in entries(GRAPHS)] == ["g1"]


def test_an_entry_that_goes_away_meanwhile_is_none(home):
    assert caches.entry(GRAPHS, "gone", [home / "graphs" / "gone.json"]) is None
    (one,) = entries(GRAPHS)
    assert caches.remove_entry(one) and not caches.remove_entry(one)


def test_only_what_is_old_is_pruned(home):
    assert [one.name for one in prune(KINDS, NEW - 1, dry=True)] == ["g1"] and entries(GRAPHS)
    assert [one.name for one in prune(KINDS, NEW - 1)] == ["g1"]
    assert not entries(GRAPHS) and entries(ENGINES) and len(entries(NATIVE)) == 2
    prune(tuple(kind for kind in KINDS if kind.made_again), NEW + 1)
    assert list(files(home)) == ["tuned/H200.json"]


def test_use_keeps_an_entry_and_looking_does_not(home):
    (one,) = entries(GRAPHS)
    assert one.about and entries(GRAPHS)[0].used == OLD
    caches.note_use(one.paths[0])
    assert entries(GRAPHS)[0].used > NEW and not prune((GRAPHS,), NEW)
    caches.note_use(home / "graphs" / "gone.json")


def test_an_export_is_imported_elsewhere_whole(home, tmp_path, monkeypatch):
    before = files(home)
    export_entries(tmp_path / "bundle", all_entries((ENGINES, GRAPHS, NATIVE, CHECKS)))
    monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path / "other"))
    found = import_bundle(tmp_path / "bundle")
    assert len(found.new) == 5 and not found.known
    carried = {name: text for name, text in before.items() if not name.endswith(".lock") and "tuned" not in name}
    assert files(tmp_path / "other") == carried
    (tmp_path / "other" / "graphs" / "g1.json").write_text("its own")
    found = import_bundle(tmp_path / "bundle")
    assert len(found.known) == 5 and (tmp_path / "other" / "graphs" / "g1.json").read_text() == "its own"


@pytest.mark.parametrize("change", ["gone", "longer"])
def test_an_entry_that_changes_while_it_is_exported_is_left_out(home, tmp_path, monkeypatch, change):
    """Another process took it away, or wrote it anew, between the list and its content."""
    graph, add = home / "graphs" / "g1.json", cache_bundle.add

    def meanwhile(bundle, name, source, size):
        if name == LIST and change == "gone":
            graph.unlink(missing_ok=True)
        elif name == LIST:
            graph.write_text(graph.read_text() + "more")
        add(bundle, name, source, size)

    monkeypatch.setattr(cache_bundle, "add", meanwhile)
    written = export_entries(tmp_path / "bundle", all_entries((ENGINES, GRAPHS, NATIVE)))
    assert [one.kind for one in written] == [one.kind for one in all_entries((ENGINES, NATIVE))]
    assert not list(tmp_path.glob(".*"))
    monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path / "other"))
    assert len(import_bundle(tmp_path / "bundle").new) == len(written)


def changed(bundle, target, change):
    """The bundle with another list, or other files."""
    with tarfile.open(bundle) as old, tarfile.open(target, "w") as new:
        for member in old:
            content = old.extractfile(member).read()
            member, content = change(member, content)
            member.size = len(content)
            new.addfile(member, io.BytesIO(content))


def renamed(text):
    def change(member, content):
        return member, content.replace(b'"g1"', text) if member.name == LIST else content

    return change


def flipped(member, content):
    return member, b"CODE" if member.name == "engines/abc/native/step.so" else content


def sparse(member, content):
    """Sixteen gigabytes, told by a few bytes."""
    if member.name == "graphs/g1.json":
        member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 34)}
    return member, content


def endless(member, content):
    return member, re.sub(rb'"g1.json": \[\d+', b'"g1.json": [Infinity', content) if member.name == LIST else content


def deep(member, content):
    return member, b"[" * 100_000 if member.name == LIST else content


def linked(member, content):
    if member.name == "graphs/g1.json":
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        return member, b""
    return member, content


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (renamed(b'"../g1"'), "no cache of graft's has"),
        (renamed(b'".hidden"'), "no cache of graft's has"),
        (renamed(b"7"), "no cache of graft's has"),
        (renamed(b'"' + b"a" * 300 + b'"'), "no cache of graft's has"),
        (flipped, "another sha256"),
        (linked, "not where its list has it"),
        (sparse, "damaged"),
        (endless, "no cache of graft's has"),
        (deep, "damaged graft-cache.json"),
    ],
    ids=["path", "hidden", "number", "long", "content", "link", "sparse", "endless", "deep"],
)
def test_damaged_and_hostile_bundles_are_refused(home, tmp_path, monkeypatch, change, why):
    export_entries(tmp_path / "bundle", all_entries())
    changed(tmp_path / "bundle", tmp_path / "bad", change)
    monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path / "other"))
    with pytest.raises(ArtifactError, match=why):
        import_bundle(tmp_path / "bad")
    left = [path.relative_to(tmp_path).as_posix() for path in (tmp_path / "other").rglob("*") if path.is_file()]
    assert not any(
        "partial" in name or "g1" in name or name.endswith("step.so") for name in left if change is flipped
    )
    assert not (tmp_path / "g1.json").exists() and not (tmp_path / "other" / "graphs" / ".hidden.json").exists()


def test_files_that_are_no_bundles(home, tmp_path):
    export_entries(tmp_path / "bundle", all_entries())
    whole = (tmp_path / "bundle").read_bytes()
    (tmp_path / "short").write_bytes(whole[: len(whole) // 3])
    (tmp_path / "text").write_text("no tar")
    with tarfile.open(tmp_path / "tar", "w") as other:
        other.add(tmp_path / "text", "text")
    (tmp_path / "folder").mkdir()
    for name in ("short", "text", "tar", "nowhere", "folder"):
        with pytest.raises(ArtifactError):
            import_bundle(tmp_path / name)


def test_names_as_people_give_them_are_carried(home, tmp_path, monkeypatch):
    (GRAPHS.folder() / "my model+v2@home.json").write_text("a graph")
    export_entries(tmp_path / "bundle", all_entries((GRAPHS,)))
    monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path / "other"))
    assert "graphs/my model+v2@home" in import_bundle(tmp_path / "bundle").new
    assert (tmp_path / "other" / "graphs" / "my model+v2@home.json").read_text() == "a graph"


def test_the_commands(home, tmp_path, capfd):
    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            app(["cache", *arguments])
        said = capfd.readouterr()
        return ended.value.code, said.out, " ".join(said.err.split())

    rows = json.loads(run("ls", "--json")[1])["items"]
    assert {row["kind"] for row in rows} == {"engines", "graphs", "native", "checks", "tuned"}
    assert "tiny, float32, cpu (native)" in " ".join(run("ls", "--kind", "engines")[1].split())
    assert json.loads(run("stats", "--json")[1])["native"]["entries"] == 2 and "captured graphs" in run("stats")[1]
    assert "5 entries" in run("export", str(tmp_path / "bundle"))[1]
    assert json.loads(run("prune", "--older", "1d", "--dry-run", "--json")[1])["dry_run"] and entries(GRAPHS)
    assert "removed 5 entries" in run("prune", "--older", "0d")[1] and entries(TUNED)
    assert "5 entries are new" in run("import", str(tmp_path / "bundle"))[1] and entries(GRAPHS)
    for arguments, why in (
        (("prune", "--older", "soon"), "a time like 30d"),
        (("ls", "--kind", "graph"), "did you mean"),
        (("import", str(tmp_path / "nowhere")), "does not exist"),
        (("export", str(tmp_path / "home" / "tuned" / "H200.json" / "x")), "cannot be written"),
    ):
        code, _, said = run(*arguments)
        assert code in (1, 2) and why in said
