"""A graph that was read from the cache is the one that was captured: text, numbers, matches, and saving it."""

from __future__ import annotations

import json
import re

import pytest
import torch

import graft.ops  # noqa: F401
from conftest import FAMILIES
from graft.base.caches import GRAPHS
from graft.capture.cache import captured_decoder
from graft.ir.io.serial import graph_from_json, graph_to_json
from graft.ir.io.symbols import Symbol, declare, fresh_mode
from graft.ir.io.text import graph_text
from graft.ir.nodes import tensor_val
from graft.ir.storage import share_storage
from graft.ir.trace import export_graph
from graft.ir.verify import module_state
from graft.models.load import load_model
from graft.passes.base import Context
from graft.passes.config import load_config
from graft.passes.pipeline import run_pipeline
from marks import FULL


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.delenv(GRAPHS.variable)
    monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path))


def numbered(text):
    """Symbols by their first place in the text: transforms make new ones, whose names torch takes from a counter."""
    names = {name: f"s<{i}>" for i, name in enumerate(dict.fromkeys(re.findall(r"\bs\d+\b", text)))}
    return re.sub(r"\bs\d+\b", lambda found: names[found[0]], text)


def matches(report):
    return {name: (record.status, len(record.matches)) for name, record in report.transforms.items()}


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stored_graph_is_the_captured_one(family):
    model = load_model(f"tiny-{family}", dtype="float32", device="cpu")
    fresh, stored = captured_decoder(model.module)
    loaded, note = captured_decoder(model.module)
    assert stored.endswith("stored") and "from the cache" in note
    assert graph_text(loaded.graph) == graph_text(fresh.graph)
    one, other = module_state(loaded), module_state(fresh)
    assert list(one) == list(other) and all(one[name] is other[name] for name in one)
    assert set(loaded.state_dict()) == set(fresh.state_dict())
    ids = torch.randint(3, 128, (2, 13), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(13).expand(2, -1)
    with torch.no_grad():
        assert torch.equal(loaded(ids, positions)[0], fresh(ids, positions)[0])
        assert not torch.equal(loaded(ids + 1, positions)[0], fresh(ids, positions)[0])
    checks = ((fresh, "matches" if FULL else "structure"), (loaded, "matches"))
    reports = [run_pipeline(gm, load_config({"verify": verify}), Context(route="decoder")) for gm, verify in checks]
    assert matches(reports[0]) == matches(reports[1])
    assert {n: c for n, (_, c) in matches(reports[1]).items()} == model.family.expected_matches(model.layers)
    assert numbered(graph_text(loaded.graph)) == numbered(graph_text(fresh.graph))
    again = graph_from_json(graph_to_json(loaded, exact=True), module_state(loaded))  # what artifacts store
    assert graph_text(again.graph) == graph_text(loaded.graph)


class Copies(torch.nn.Module):
    def forward(self, x, y):
        z = x.sin()
        same = z.to(x.dtype, copy=True)
        part = z.transpose(0, 1)
        return same, part, y.sin().transpose(0, 1), y.cos()


class Writes(torch.nn.Module):
    def forward(self, x, y):
        x.add_(1)
        return x.sin(), y.sin()


def dump(module):
    dims = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    gm = export_graph(module, (torch.ones(3, 4), torch.ones(3, 4)), dynamic_shapes=(dims, dims))
    return gm, graph_to_json(gm, exact=True)


def shared(gm):
    """Which pairs of nodes are in one memory."""
    values = {node.name: tensor_val(node) for node in gm.graph.nodes if node.op == "call_function"}
    named = {name: value for name, value in values.items() if value is not None}
    return {(a, b) for a in named for b in named if a < b and share_storage(named[a], named[b])}


def test_equal_storages_are_read_as_one_but_a_copy_stays_a_copy():
    gm, text = dump(Copies())
    data = json.loads(text)
    assert len(set(data["alike"])) < len(data["alike"])
    loaded = graph_from_json(text)
    assert shared(gm) <= shared(loaded), "views stay views"
    copied = next(n.name for n in gm.graph.nodes if "to" in n.name or "clone" in n.name)
    source = next(n for n in gm.graph.nodes if n.name == copied).all_input_nodes[0].name
    assert tuple(sorted((copied, source))) not in shared(loaded)
    assert graph_text(loaded.graph) == graph_text(gm.graph)


def test_a_graph_that_writes_keeps_every_storage_apart():
    gm, text = dump(Writes())
    assert "alike" not in json.loads(text)
    assert shared(graph_from_json(text)) == shared(gm)


def test_files_without_that_information_are_read_as_before():
    gm, text = dump(Copies())
    old = json.loads(text)
    del old["alike"]
    loaded = graph_from_json(json.dumps(old))
    assert shared(loaded) == shared(gm) and graph_text(loaded.graph) == graph_text(gm.graph)


def test_new_sizes_of_a_loaded_graph_have_new_names():
    """torch numbers new symbols by a hash below 100; a name that is taken would make two sizes one."""
    taken = [Symbol(f"s{number}", 7, 2, None) for number in range(100)]
    mode = fresh_mode()
    declare(taken, mode)
    (size,) = mode.from_tensor(torch.empty(13), static_shapes=False).shape
    assert str(size) not in {symbol.name for symbol in taken} and size.node.hint == 13
