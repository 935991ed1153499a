"""Python code that comes with a model's folder runs when the user says so, and never otherwise."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import graft
from conftest import tiny
from graft.base.errors import GraftError, UsageError
from graft.cli.app import app
from graft.engine.llm import LLM
from graft.models.load import load_model
from marks import examples

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
with Path({marker!r}).open("a") as file:
    file.write("ran\\n")
class OwnConfig(LlamaConfig):
    model_type = "own_llama"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
STOP = ["--set", "transforms.insert_kv_cache.enabled=false"]  # refused after loading, before seconds of capture
MAP = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """Where the code leaves a trace; whoever asks on standard input fails the test."""
    asked = []
    monkeypatch.setattr("builtins.input", asked.append)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    yield tmp_path / "marker"
    assert asked == []


@pytest.fixture
def folder(tmp_path, marker):
    tiny("llama").module.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "own.py").write_text(CODE.format(marker=str(marker)))
    return tmp_path / "model"


def configure(folder: Path, file: str = "config.json", **entries) -> None:
    path = folder / file
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **entries}))


def test_a_folders_model_needs_trust(folder, marker):
    configure(folder, model_type="own_llama", auto_map=MAP)
    with pytest.raises(UsageError, match=r"config\.json: AutoConfig is own\.OwnConfig.*--trust-remote-code") as told:
        LLM(folder, device="cpu")
    assert "\n" not in str(told.value) and not marker.exists()
    model = load_model(folder, device="cpu", trust_remote_code=True)
    assert marker.read_text() and type(model.module).__name__ == "OwnModel"
    assert any("ran, as you allowed" in note for note in model.notes)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(model.module(ids).logits, tiny("llama").module(ids).logits)


def test_a_folders_model_that_transformers_knows_runs_without_its_code_and_says_so(folder, marker):
    configure(folder, auto_map=MAP)
    model = load_model(folder, device="cpu")
    assert not marker.exists() and type(model.module).__name__ == "LlamaForCausalLM"
    assert any("did not run" in note and "own.OwnModel" in note for note in model.notes)


@pytest.mark.parametrize("auto_map", [{"AutoTokenizer": [None, "own.OwnTokenizer"]}, [None, "own.OwnTokenizer"]])
def test_a_folders_tokenizer_needs_trust(folder, marker, auto_map):
    configure(folder, "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=auto_map)
    configure(folder, model_type="llama")
    try:
        load_model(folder, device="cpu")
    except GraftError as error:
        assert "\n" not in str(error)
    assert not marker.exists()


def test_the_commands_never_ask_and_take_the_option(folder, marker):
    configure(folder, model_type="own_llama", auto_map=MAP)
    command = ["run", "-m", str(folder), "--token-ids", "1,2", *STOP]
    refused = CliRunner().invoke(app, command, input="y\n" * 9)
    assert refused.exit_code == 2 and refused.stderr.count("\n") == 1 and not marker.exists()
    assert "Do you wish" not in refused.output
    allowed = CliRunner().invoke(app, [*command, "--trust-remote-code"])
    assert "needs the transform insert_kv_cache" in allowed.stderr and marker.exists()
    assert "graft: note: code of the model's folder ran" in allowed.stderr


def test_a_kernel_named_by_the_config_is_not_fetched(folder, monkeypatch):
    """transformers loads an attention named owner/kernel from the Hub, and runs it."""
    monkeypatch.setattr("transformers.modeling_utils.is_kernel", lambda name: pytest.fail(name) if "/" in name else 0)
    configure(folder, _attn_implementation="someone/kernel", attn_implementation="someone/kernel")
    assert load_model(folder, device="cpu").module.config._attn_implementation == "sdpa"


PLACES = st.sampled_from(["own.OwnConfig", "own.OwnModel", "own.OwnTokenizer", "other--own.OwnModel", "", None, 3])
KEYS = st.sampled_from(["AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer", "x"])
MAPS = st.one_of(st.none(), PLACES, st.lists(PLACES, max_size=3), st.dictionaries(KEYS, PLACES | st.lists(PLACES)))


@settings(max_examples=examples(40), deadline=None)
@given(
    config=MAPS,
    tokenizer=MAPS,
    kind=st.sampled_from(["llama", "own_llama", "", None]),
    tokenizer_class=st.sampled_from([None, "OwnTokenizer", "PreTrainedTokenizerFast", "LlamaTokenizer"]),
)
def test_no_mixture_of_entries_runs_code_or_escapes_as_a_foreign_error(
    tmp_path_factory, config, tokenizer, kind, tokenizer_class
):
    folder = tmp_path_factory.mktemp("own")
    marker = folder / "marker"
    tiny("llama").module.save_pretrained(folder)
    (folder / "own.py").write_text(CODE.format(marker=str(marker)))
    configure(folder, model_type=kind, auto_map=config)
    configure(folder, "tokenizer_config.json", auto_map=tokenizer, tokenizer_class=tokenizer_class)
    try:
        load_model(folder, device="cpu")
    except GraftError as error:
        assert "\n" not in str(error)
    assert not marker.exists()


def test_every_call_of_transformers_says_whether_code_may_run():
    texts = {path: path.read_text() for path in Path(graft.__file__).parent.rglob("*.py")}
    calls = [path for path, text in texts.items() if "from_pretrained(" in text or "from_config(" in text]
    assert calls
    for path in calls:
        for node in ast.walk(ast.parse(texts[path])):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                loads = node.func.attr in ("from_pretrained", "from_config")
                assert not loads or "trust_remote_code" in {key.arg for key in node.keywords}, path
