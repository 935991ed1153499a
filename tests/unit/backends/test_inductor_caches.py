"""Lookups in Inductor's caches, counted with reasons, and graft's files among torch's cache artifacts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graft
from graft.backends import inductor_caches
from graft.backends.inductor import reset_compiler
from graft.backends.inductor_caches import GraftArtifact, Lookups, only_new_artifacts, watched_lookups
from graft.base import caches
from graft.base.errors import UsageError

X = torch.randn(4, 8)


class Small(nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2 + x


@pytest.fixture
def home(tmp_path, monkeypatch):
    for kind in caches.CARRIED:
        monkeypatch.setenv(kind.variable, str(tmp_path / kind.name))
    monkeypatch.setattr(inductor_caches, "USED", {})
    return tmp_path


def found_in(report):
    return [note for note in report.notes if note.startswith("Inductor's caches")]


def test_reports_count_lookups_of_both_routes():
    reset_compiler()
    compiled = graft.compile(Small(), (X,), backend="inductor")
    assert not found_in(compiled.report)  # nothing is compiled before the first call
    with torch.no_grad():
        compiled(X)
        (note,) = found_in(compiled.report)
        assert "1 hit" in note or "1 miss" in note
        reset_compiler()
        backend = graft.Backend()
        torch.compile(Small(), backend=backend)(X)
        reset_compiler()
        torch.compile(Small(), backend=backend)(X)
    assert found_in(backend.reports[1]) == ["Inductor's caches: 1 hit"]


def test_a_bypass_is_told_with_its_reason():
    def nameless(graph):
        """A pass without a key."""

    reset_compiler()
    compiled = graft.compile(Small(), (X,), backend="inductor", options={"post_grad_custom_post_pass": nameless})
    with torch.no_grad():
        compiled(X)
    (note,) = found_in(compiled.report)
    assert note.startswith("Inductor's caches: 1 bypass (") and "post grad custom pass" in note


def test_torchs_exceptions_are_as_they_were():
    from torch._inductor.codecache import BypassFxGraphCache

    with watched_lookups() as found:
        assert str(BypassFxGraphCache("no key")) == "no key"
    assert found.reasons == ["no key"] and "__init__" not in vars(BypassFxGraphCache)
    BypassFxGraphCache("another")
    assert found.reasons == ["no key"]


@pytest.mark.parametrize(
    ("counts", "reasons", "text"),
    [
        ({"hit": 0, "miss": 0, "bypass": 0}, [], ""),
        ({"hit": 2, "miss": 1, "bypass": 0}, [], "Inductor's caches: 2 hits, 1 miss"),
        ({"hit": 0, "miss": 2, "bypass": 2}, ["a", "b"], "Inductor's caches: 2 misses, 2 bypasses (a; b)"),
    ],
)
def test_what_a_report_says(counts, reasons, text):
    assert Lookups(counts, reasons).note() == text


def test_files_that_were_used_go_with_torchs_artifacts(home):
    """Of graft's own kinds alone, every file of an entry but its lock; a file that is there stays."""
    for name in ("native/n1.so", "native/n1.cpp", "native/n1.lock", "native/n2.so", "graphs/g1.json"):
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text(name)
    inductor_caches.USED.update({home / "native" / "n1.so": None, home / "graphs" / "g1.json": None})
    with only_new_artifacts():
        content = graft.save_cache_artifacts()
    assert content is not None
    for name in ("native/n1.so", "native/n1.cpp", "native/n2.so"):
        (home / name).unlink()
    (home / "graphs" / "g1.json").write_text("its own")
    with only_new_artifacts():
        found = graft.load_cache_artifacts(content)
    assert found == {"graft": ["native/n1.cpp", "native/n1.so", "graphs/g1.json"]}
    assert (home / "native" / "n1.so").read_text() == "native/n1.so" and not (home / "native" / "n2.so").exists()
    assert (home / "graphs" / "g1.json").read_text() == "its own"


@pytest.mark.parametrize("key", ["native/../../x", "native/.hidden", "engines/x", "x", "native/a/b"])
def test_keys_that_lead_elsewhere_are_refused(home, key):
    with pytest.raises(UsageError, match="no file of graft's caches"):
        GraftArtifact(key, b"").populate_cache()
    assert not list(home.rglob("*"))


def test_damaged_artifacts_are_refused():
    with pytest.raises(UsageError, match="no cache artifacts"):
        graft.load_cache_artifacts(b"damaged")
