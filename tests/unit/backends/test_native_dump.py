"""`graft dump --native`, and the layer in docs/native.md: what is printed is what is compiled."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from conftest import tiny
from graft import LLM
from graft.cli.app import app
from native_cases import needs_compiler

DOC = Path(__file__).parents[3] / "docs" / "native.md"


def dump(*options: str):
    return CliRunner().invoke(app, ["dump", "tiny-llama", "--native", "--dtype", "float32", *options])


@cache
def printed() -> str:
    told = dump("--json")
    assert told.exit_code == 0, told.output
    return json.loads(told.stdout)["native"]


def first_layer(source: str) -> str:
    """From its heading to the next one's."""
    parts = re.split(r"(?m)^(?=  // ── )", source)
    return next(part for part in parts if part.startswith("  // ── model.layers.0 ")).rstrip()


@pytest.mark.exhaustive
def test_the_documented_layer_is_the_generated_one():
    shown = re.search(r"```cpp\n(.*?)\n```", DOC.read_text(), re.S)
    assert shown is not None and shown.group(1) == first_layer(printed())


@pytest.mark.exhaustive
def test_names_of_the_graph_are_comments():
    source = printed()
    layer = first_layer(source)
    assert "// 3: %fused_linear" in layer and "/* model.layers.0.mlp.down_proj.weight */" in layer
    assert "/* k_cache_0 */" in layer and max(map(len, source.splitlines())) <= 130
    assert source.count("team.barrier();") > 8 and "eager:" not in source


@pytest.mark.exhaustive
@needs_compiler
def test_what_is_printed_is_what_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAFT_NATIVE_CACHE_DIR", str(tmp_path))
    LLM(tiny("llama"), backend="native", kv_cache_memory="8MiB")
    assert printed() in [path.read_text() for path in tmp_path.glob("*.cpp")]


def test_it_goes_into_the_folder_of_a_dump(tmp_path):
    told = dump("-o", str(tmp_path / "dump"))
    assert told.exit_code == 0, told.output
    assert (tmp_path / "dump" / "native.cpp").read_text() == printed() and "native.cpp" in told.stdout


def test_without_a_folder_there_is_nothing_else_to_print():
    told = CliRunner().invoke(app, ["dump", "tiny-llama"])
    assert told.exit_code != 0 and "--output" in f"{told.output}{told.exception}"


def test_what_stays_eager_stands_at_the_end():
    told = dump("--set", "kernels.rope_attention=reference")
    assert told.exit_code == 0, told.output
    assert "// eager: %rope_attention_default, graft.rope_attention.default: the configuration names" in told.stdout
