"""What an engine is asked for, as the command that would compile it anew."""

from __future__ import annotations

import json

import pytest

import graft
from conftest import tiny
from graft.base.errors import UsageError
from graft.engine.artifact.request import EngineRequest
from graft.engine.options import EngineOptions

SMALL = {"kv_cache_memory": "8MiB"}


@pytest.mark.parametrize(
    "request_",
    [
        EngineRequest("tiny-llama"),
        EngineRequest(
            "/a folder/m", dtype="bfloat16", device="cpu", backend="eager", config="/x.yaml", quantize="int8"
        ),
        EngineRequest(
            "/m", EngineOptions(max_model_len=64, kv_cache_dtype="fp8"), sets=("a.b=c",), plugins=("p", "q")
        ),
        EngineRequest("/m", trust_remote_code=True, with_weights=True),
    ],
    ids=str,
)
def test_the_command_of_a_request_gives_it_back(request_):
    assert EngineRequest.of_command(request_.command()) == request_


def test_the_command_of_a_request_holds_in_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    assert EngineRequest("own", config="c.yaml").command() == (
        "compile", str(tmp_path / "own"), f"--config={tmp_path / 'c.yaml'}",
    )  # fmt: skip
    assert EngineRequest("own", config={"verify": "matches"}).command() == ()  # no command has it


def test_a_saved_engine_is_not_recompiled_as_another_model(tmp_path):
    """By its folder's name, which the registry has too."""
    tiny("qwen3").module.save_pretrained(tmp_path / "tiny-llama")
    llm = graft.LLM(tmp_path / "tiny-llama", backend="eager", dtype="float32", **SMALL)
    llm.save(tmp_path / "engine")
    assert json.loads((tmp_path / "engine" / "manifest.json").read_text())["made_by"] == [
        "compile", str(tmp_path / "tiny-llama"), "--dtype=float32", "--backend=eager",
    ]  # fmt: skip


def test_what_is_no_compiled_engine_is_not_recompiled():
    with pytest.raises(UsageError, match="is for compiled engines"):
        graft.LLM("tiny-llama", recompile=True)
