"""app.yaml, and the verbs that read it, without Ray."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest
import yaml
from typer.testing import CliRunner

from graft.base.errors import UsageError
from graft.cli.app import app
from graft.deploy.policy import RoutePolicy
from graft.deploy.spec import AppSpec, Scaling, app_spec
from graft.serve.options import ModelOptions, ServeOptions

SERVE = ServeOptions(ModelOptions("smollm2-135m"))


def deploy(tmp_path, text, *more):
    file = tmp_path / "app.yaml"
    file.write_text(text)
    return CliRunner().invoke(app, ["deploy", str(file), *more])


def test_a_dry_run_shows_the_plan(tmp_path):
    text = """
name: chat
serve: {model: smollm2-135m, max-num-seqs: 8, api-key: [secret], port: 9000, transforms: {fuse_rope: {enabled: true}}}
replicas: {min: 1, max: 4, open_requests: 2.5, down_after: 60}
gpus: 1
routing: {slack: 3}
"""
    told = deploy(tmp_path, text, "--dry-run", "--json")
    assert told.exit_code == 0, told.output
    plan = json.loads(told.stdout)
    times = {"up_after": 30, "down_after": 60}
    assert plan["replicas"] == {"min": 1, "max": 4, "open_requests": 2.5, **times, "cpus": 1, "gpus": 1}
    assert plan["routing"] == {"least_share": 0.25, "slack": 3}
    assert (plan["name"], plan["address"]) == ("chat", "http://127.0.0.1:9000")
    assert plan["serve"]["max_num_seqs"] == 8 and plan["serve"]["config"]["transforms"]
    assert "secret" not in told.stdout
    assert {"schema": "deploy-plan/1", **yaml.safe_load(deploy(tmp_path, text, "--dry-run").stdout)} == plan


def test_what_runs_is_told_as_a_line_or_a_document(tmp_path, monkeypatch):
    """What the cluster says is made up here; test_replicas.py has a real one."""
    told = {"name": "graft", "url": "http://127.0.0.1:8000/v1", "changed": True, "status": "RUNNING",
            "replicas": {"EngineReplica": {"RUNNING": 2}}, "lacking": {"CPU": 1.0}}  # fmt: skip
    monkeypatch.setitem(sys.modules, "graft.deploy.run", SimpleNamespace(deploy=lambda spec, address: told))
    text = "serve: {model: smollm2-135m}\nreplicas: 2\n"
    assert json.loads(deploy(tmp_path, text, "--json").stdout) == {"schema": "deploy/1", **told}
    plain = deploy(tmp_path, text).stdout
    assert "has 1 CPU too few for 2 replicas" in plain and "is running at http://127.0.0.1:8000/v1" in plain


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("replica: 2", "unknown key 'replica'; did you mean 'replicas'"),
        ("serve: {modell: x}", "serve: unknown key 'modell'"),
        ("serve: {model: smollm2-135}", "smollm2-135m"),
        ("serve: 3", "serve must be a mapping"),
        ("serve: {replicas: 2}", "write it beside it"),
        ("serve: {port: http}", "port"),
        ("[1, 2]", "must be a mapping"),
        ("replicas: 0", "replicas must be at least 1"),
        ("replicas: two", "replicas must be a whole number, not 'two'"),
        ("replicas: true", "replicas must be a whole number"),
        ("replicas: {min: 3, max: 2}", "min must be at least 1 and at most max"),
        ("replicas: {min: 3}", "max is missing"),
        ("replicas: {max: 2, open_requests: 0}", "open_requests must be more than 0"),
        ("replicas: {max: 2, up_after: -1}", "up_after must be at least 0 seconds"),
        ("replicas: {most: 2}", "replicas: unknown key 'most'"),
        ("gateways: 0", "gateways must be at least 1"),
        ("gateways: 1.5", "gateways must be a whole number"),
        ("attempts: 0", "attempts must be at least 1"),
        ("gpus: -1", "gpus must be at least 0"),
        ("cpus: many", "cpus must be a number"),
        ("name: 3", "name must be a text"),
        ("routing: random", "routing must be a mapping"),
        ("routing: {slack: -1}", "slack must be at least 0"),
        ("routing: {least_share: 2}", "least_share must be above 0"),
        ("serve: {kv-events-config: '{\"enable_kv_cache_events\": true}'}", "replicas cannot share it"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(tmp_path, text, told):
    found = deploy(tmp_path, text, "--dry-run")
    assert found.exit_code == 2 and found.stdout == ""
    assert told in found.stderr and len(found.stderr.strip().splitlines()) == 1


def test_a_file_that_is_not_there(tmp_path):
    found = CliRunner().invoke(app, ["deploy", str(tmp_path / "none.yaml"), "--dry-run"])
    assert found.exit_code == 2 and "does not exist" in found.stderr


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
@pytest.mark.parametrize("verb", ["deploy", "serve"])
def test_without_ray_the_command_to_install_it_is_told(tmp_path, verb):
    """One replica needs none."""
    found = deploy(tmp_path, "{}") if verb == "deploy" else CliRunner().invoke(app, ["serve", "--replicas", "2"])
    assert found.exit_code == 2
    assert "needs ray, which is not installed: pip install 'graft[ray]'" in found.stderr


def test_a_folder_is_named_as_every_process_finds_it(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    found = AppSpec(ServeOptions(ModelOptions("model"))).found
    assert found.serve.load.model == str(tmp_path / "model") and found.serve.names == ("model",)
    assert AppSpec(SERVE).found.serve.load.model == "smollm2-135m"


def test_defaults():
    found = app_spec({}, SERVE, "app.yaml")
    assert found == AppSpec(SERVE, replicas=Scaling(1, 1), routing=RoutePolicy()) and found.replicas.fixed
    with pytest.raises(UsageError, match="name must not be empty"):
        app_spec({"name": ""}, SERVE, "app.yaml")
