"""The command line as a person uses it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from graft.cli.app import app
from graft.passes.registry import TransformRegistry
from processes import run_python


def graft(*args, stdin="", **env):
    """In this process, because importing torch and transformers takes seconds; in its own where `env` matters."""
    if env:
        return run_python("-m", "graft", *args, env={**os.environ, **env})
    result = CliRunner().invoke(app, list(args), input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return SimpleNamespace(returncode=result.exit_code, stdout=result.stdout, stderr=result.stderr)


@pytest.mark.exhaustive
def test_the_program_lists_its_transforms():
    told = graft("transforms", "--json", COLUMNS="160")
    assert told.returncode == 0 and json.loads(told.stdout)["items"][0]["order"] == 1


def test_the_program_runs_on_its_own():
    refused = graft("run", "hi", "-m", "no-such-model", COLUMNS="160")
    assert refused.returncode == 2 and "unknown model" in refused.stderr and "Traceback" not in refused.stderr


def test_help_does_not_import_torch():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom graft.cli.app import app\n"
        "result = CliRunner().invoke(app, ['--help'])\n"
        "assert result.exit_code == 0 and 'transforms' in result.output\n"
        "for verb in ('run', 'chat', 'serve', 'bench', 'events', 'dump', 'diff', 'models', 'config', 'transforms',"
        " 'new-transform'):\n"
        "    assert CliRunner().invoke(app, [verb, '--help']).exit_code == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\nimport graft\nassert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_run_prints_tokens_and_speed():
    result = graft("run", "-m", "tiny-llama", "--token-ids", "5,6,7", "--max-tokens", "4", "--compare", "--table")
    assert result.returncode == 0, result.stderr
    assert "[5, 6, 7] → [" in result.stdout and "insert_kv_cache" in result.stdout
    assert "Hugging Face eager" in result.stdout and "tokens/s" in result.stdout
    told = " ".join(result.stdout.split())
    assert "logits off float64, relative to their norm: prompt" in told and "mixed batch" in told
    assert "in float32 results are off by" in told and "in bfloat16" in told and "in float16" in told


def test_run_json_is_one_document():
    result = graft("run", "-m", "tiny-llama", "--token-ids", "5,6,7", "--max-tokens", "4", "--json", "--seed", "1")
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
        (["run", "hi", "--token-ids", "1,2"], 2, "not both"),
        (["run", "-m", "tiny-llama", "--token-ids", "1,2", "--chat"], 2, "not token ids"),
        (["models", "--markdown", "--json"], 2, "choose one"),
        (["dump", "tiny-llama"], 2, "output"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_errors_are_one_line_with_their_exit_code(args, code, message):
    result = graft(*args)
    assert result.returncode == code
    assert message in result.stderr and "Traceback" not in result.stderr


def test_transforms_config_and_models_list():
    rows = json.loads(graft("transforms", "--json").stdout)["items"]
    assert [r["order"] for r in rows] == list(range(1, len(rows) + 1)) and rows[0]["name"] == "join_copies"
    assert "fuse_rms_norm" in graft("transforms").stdout
    config = json.loads(graft("config", "--json", "--set", "transforms.fuse_rope.enabled=false").stdout)
    assert config["transforms"]["fuse_rope"]["enabled"] is False
    assert config["origins"]["transforms.fuse_rope.enabled"].startswith("--set")
    assert "# default.yaml" in graft("config", "-m", "llama-3.2-1b").stdout
    models = json.loads(graft("models", "--json").stdout)["items"]
    assert {"smollm2-135m", "tiny-gpt2"} <= {m["name"] for m in models}


@pytest.mark.exhaustive  # the short run: unit/cli/inspect
def test_dump_writes_graphs_and_refuses_foreign_folders(tmp_path):
    result = graft("dump", "tiny-gemma-2", "-o", str(tmp_path / "d"))
    assert result.returncode == 0, result.stderr
    graphs = len(list((tmp_path / "d").glob("0*.txt")))
    assert f"{graphs} graphs in" in result.stdout and graphs > 8
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("x")
    refused = graft("dump", "tiny-gemma-2", "-o", str(tmp_path / "mine"))
    assert refused.returncode == 1 and "not written by graft" in refused.stderr


def test_explain_tells_matches_and_reasons():
    told = graft("explain", "tiny-llama", "fuse_rms_norm", "--verify")
    assert told.returncode == 0, told.stderr
    assert "5 matches" in told.stdout and "layer 1" in told.stdout and "outside the layers" in told.stdout
    assert "modeling_llama.py:" in told.stdout and "error" in told.stdout
    document = json.loads(graft("explain", "tiny-gpt2", "fuse_rope", "--json").stdout)
    assert document["matches"] == [] and "nothing in the graph rotates parts of a head" in document["reason"]
    unknown = graft("explain", "tiny-llama", "fuse_ropes")
    assert unknown.returncode == 2 and "did you mean 'fuse_rope'" in unknown.stderr


def test_ops_lists_kernels_and_reasons():
    told = graft("ops", "rope", "attention", "--device", "cpu")
    assert told.returncode == 0, told.stderr
    assert "graft::rope" in told.stdout and "not where Triton kernels run on a GPU" in told.stdout
    rows = json.loads(graft("ops", "rope", "--device", "cpu", "--json").stdout)["items"]
    assert {row["kernel"] for row in rows} == {"triton", "native", "reference"} and all(row["cases"] for row in rows)
    forced = graft(
        "run",
        "-m",
        "tiny-llama",
        "--token-ids",
        "5",
        "--set",
        "kernels.rope=triton",
        "--device",
        "cpu",
        "--backend",
        "eager",
    )
    assert forced.returncode == 1 and "kernel 'triton' of graft::rope cannot run this call" in forced.stderr


def test_verify_shows_the_numeric_checks():
    told = graft("run", "-m", "tiny-llama", "--token-ids", "5,6", "--max-tokens", "2", "--verify")
    assert told.returncode == 0, told.stderr
    assert (
        "fuse_rope: 4 checked numerically, worst" in told.stdout
        and "insert_kv_cache: not checked numerically" in told.stdout
    )


PLUGIN = """
from graft.ir.nodes import calls
from graft.passes.base import BaseTransform, Outcome
from graft.passes.registry import TransformRegistry

@TransformRegistry.register("wreck")
class Wreck(BaseTransform):
    def apply(self, gm, context):
        node = next(iter(calls(gm.graph)))
        node.args = ()
        raise ValueError("half-way")
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A folder of the Python path whose transform and module are gone afterwards."""
    (tmp_path / "wreck_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    yield "wreck_plugin"
    TransformRegistry._known.pop("wreck", None)
    sys.modules.pop("wreck_plugin", None)


def test_a_transform_that_fails_ends_the_run_or_is_skipped(plugin):
    common = [
        "run",
        "-m",
        "tiny-llama",
        "--token-ids",
        "5,6",
        "--max-tokens",
        "2",
        "--plugin",
        plugin,
        "--json",
        "--backend",
        "eager",
    ]
    common += ["--set", "transforms.wreck.stage=match"]
    failed = graft(*common)
    assert (
        failed.returncode == 1 and "transform wreck failed and was rolled back: ValueError: half-way" in failed.stderr
    )
    skipped = graft(*common, "--set", "transforms.wreck.on_error=skip")
    assert skipped.returncode == 0, skipped.stderr
    record = json.loads(skipped.stdout)["report"]["transforms"]["wreck"]
    assert record["status"] == "rolled_back" and "half-way" in record["reason"]


def test_prompt_from_standard_input_is_taken():
    result = graft("run", "-m", "tiny-llama", stdin="hello\n")
    assert result.returncode == 1 and "has no tokenizer" in result.stderr
