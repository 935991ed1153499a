"""The command line as a person uses it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


def graft(*args, stdin=None, **env):
    return subprocess.run(
        [sys.executable, "-m", "graft.cli.app", *args],
        capture_output=True,
        text=True,
        input=stdin if stdin is not None else "",
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "160", **env},
        check=False,
    )


def test_help_does_not_import_torch_r62():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom graft.cli.app import app\n"
        "result = CliRunner().invoke(app, ['--help'])\n"
        "assert result.exit_code == 0 and 'transforms' in result.output\n"
        "for verb in ('run', 'dump', 'models', 'config', 'transforms'):\n"
        "    assert CliRunner().invoke(app, [verb, '--help']).exit_code == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\nimport graft\nassert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_run_prints_tokens_and_speed():
    result = graft("run", "-m", "tiny-llama", "--token-ids", "5,6,7", "--max-tokens", "4", "--compare", "--table")
    assert result.returncode == 0, result.stderr
    assert "[5, 6, 7] → [" in result.stdout and "insert_kv_cache" in result.stdout
    assert "Hugging Face eager" in result.stdout and "tokens/s" in result.stdout


def test_run_json_is_one_document_r61():
    result = graft("run", "-m", "tiny-qwen3", "--token-ids", "5,6,7", "--max-tokens", "4", "--json", "--seed", "1")
    document = json.loads(result.stdout)
    assert 1 <= len(document["outputs"][0]["token_ids"]) <= 4
    assert document["report"]["transforms"]["fuse_rope"]["status"] == "applied"


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["run", "hi", "-m", "no-such-model"], 2, "unknown model 'no-such-model'"),
        (["run", "hi", "--set", "transforms.fuse_rope.enabeld=false"], 2, "did you mean 'enabled'"),
        (["run", "hi", "-m", "tiny-llama"], 1, "has no tokenizer"),
        (["run", "-m", "tiny-llama", "--token-ids", "1,x"], 2, "--token-ids takes numbers"),
        (["run", "-m", "tiny-llama", "--token-ids", "1", "--max-tokens", "0"], 2, "max_tokens must be at least 1"),
        (["run", "-m", "tiny-llama", "--token-ids", "1", "--max-tokens", "999"], 2, "context is 256"),
        (["run", "hi", "-m", "tiny-llama", "--device", "cuda:0"], 2, "no GPU is available"),
        (["run", "hi", "--config", "none.yaml"], 2, "does not exist"),
        (["config", "--model", "no-such-model"], 2, "unknown model"),
        (["dump", "tiny-llama"], 2, "output"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_errors_are_one_line_with_their_exit_code_r63(args, code, message):
    result = graft(*args)
    assert result.returncode == code
    assert message in result.stderr and "Traceback" not in result.stderr


def test_transforms_config_and_models_list_r61():
    rows = json.loads(graft("transforms", "--json").stdout)
    assert [r["order"] for r in rows] == list(range(1, len(rows) + 1)) and rows[0]["name"] == "fuse_rms_norm"
    assert "RMSNorm becomes one op" in graft("transforms").stdout
    config = json.loads(graft("config", "--json", "--set", "transforms.fuse_rope.enabled=false").stdout)
    assert config["transforms"]["fuse_rope"]["enabled"] is False
    assert config["origins"]["transforms.fuse_rope.enabled"].startswith("--set")
    assert "# default.yaml" in graft("config", "-m", "llama-3.2-1b").stdout
    models = json.loads(graft("models", "--json").stdout)
    assert {"smollm2-135m", "tiny-gpt2"} <= {m["name"] for m in models}


def test_dump_writes_graphs_and_refuses_foreign_folders(tmp_path):
    result = graft("dump", "tiny-gemma-2", "-o", str(tmp_path / "d"))
    assert result.returncode == 0, result.stderr
    assert "9 graphs in" in result.stdout
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("x")
    refused = graft("dump", "tiny-gemma-2", "-o", str(tmp_path / "mine"))
    assert refused.returncode == 1 and "not written by graft" in refused.stderr


def test_prompt_from_standard_input_is_taken():
    result = graft("run", "-m", "tiny-llama", stdin="hello\n")
    assert result.returncode == 1 and "has no tokenizer" in result.stderr
