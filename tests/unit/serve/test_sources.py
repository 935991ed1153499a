"""The options of graft serve from the command, the environment and a file; https and CORS."""

from __future__ import annotations

import ssl
import subprocess

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command

from graft.base.errors import GraftError, UsageError
from graft.cli.app import app
from graft.cli.generate.serve_sources import layered, named
from graft.engine.options import EngineOptions
from graft.serve.options import ModelOptions, ServeOptions, options_from
from graft.serve.run import tls
from serve_cases import PATIENCE, http_client, serving

COMMAND = get_command(app).commands["serve"]


def read(*arguments, **environment):
    ctx = COMMAND.make_context("serve", list(map(str, arguments)))
    given = {name: value for name, value in ctx.params.items() if name not in ("strict", "traceback")}
    return options_from(layered(ctx, given, {f"GRAFT_SERVE_{k.upper()}": v for k, v in environment.items()}))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sources")


def write(folder, text):
    path = folder / "serve.yaml"
    path.write_text(text)
    return path


@given(st.sets(st.sampled_from(["command", "environment", "file"])))
def test_the_nearer_source_wins(folder, sources):
    file = write(folder, "max-num-seqs: 3\n" if "file" in sources else "{}")
    arguments = ["--config", file] + (["--max-num-seqs", 1] if "command" in sources else [])
    found = read(*arguments, **({"max_num_seqs": "2"} if "environment" in sources else {}))
    order = {"command": 1, "environment": 2, "file": 3}
    assert found.load.engine["max_num_seqs"] == min((order[one] for one in sources), default=None)


def test_a_server_bounds_the_prompts_beside_sequences_that_decode(folder):
    assert read().load.engine["max_mixed_prefill_tokens"] == 2048
    assert EngineOptions().max_mixed_prefill_tokens is None  # all prompts of a list at once are served faster so
    assert read("--max-mixed-prefill-tokens", 512).load.engine["max_mixed_prefill_tokens"] == 512


def test_every_kind_of_value_from_a_file(folder):
    text = """
        model: smollm2-135m
        port: 9000
        served_model_name: [a, b]
        api-key: secret
        max-queue-time: 2
        restart: true
        enable-prefix-caching: false
        kv-cache-dtype: fp8
        kv-cache-memory: 1GiB
        max-model-len: null
        json: yes
        set: [transforms.fuse_rope.enabled=false]
        allowed-origins: https://chat.example.com
        transforms: {fuse_rms_norm: {enabled: false}}
        """
    found = read("--config", write(folder, text), "--port", 0)
    assert (found.port, found.names, found.api_key, found.max_queue_time) == (0, ("a", "b"), ("secret",), 2.0)
    assert found.restart and found.json_logs and found.allowed_origins == ("https://chat.example.com",)
    assert found.load.model == "smollm2-135m" and found.load.sets == ("transforms.fuse_rope.enabled=false",)
    assert found.load.config == {"transforms": {"fuse_rms_norm": {"enabled": False}}}
    engine = found.load.engine
    assert (engine["enable_prefix_caching"], engine["kv_cache_dtype"], engine["max_model_len"]) == (
        False,
        "fp8",
        None,
    )


def test_every_kind_of_value_from_the_environment(folder):
    file = write(folder, "port: 1\nhost: 0.0.0.0\n")
    found = read(
        model="m", port="9000", served_model_name="[a, b]", api_key="secret", restart="true", json="1",
        config=str(file), set="transforms.fuse_rope.after=[x]", enable_prefix_caching="off",
        drain_timeout="1.5", max_model_len="",
    )  # fmt: skip
    assert (found.port, found.host, found.names) == (9000, "0.0.0.0", ("a", "b"))
    assert found.api_key == ("secret",) and found.restart and found.json_logs and found.drain_timeout == 1.5
    assert found.load.model == "m" and found.load.sets == ("transforms.fuse_rope.after=[x]",)
    assert not found.load.engine["enable_prefix_caching"] and found.load.engine["max_model_len"] is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-num-seq: 3", "unknown key 'max-num-seq'; did you mean 'max_num_seqs'"),
        ("config: other.yaml", "unknown key 'config'"),
        ("port: many", "port: 'many' cannot be meant: "),
        ("port: [1]", "port: takes one value"),
        ("port: true", "no true or false"),
        ("restart: 1", "restart: takes true or false"),
        ("restart: maybe", "restart: "),
        ("host: {a: 1}", "host: takes one value"),
        ("- a", "must be a mapping"),
        ("a: [", "is not YAML"),
        ("port: 70000", "--port must be at most 65535"),
    ],
)
def test_files_that_cannot_be_meant(folder, text, said):
    with pytest.raises(GraftError, match=r"config file|--port") as found:
        read("--config", write(folder, text))
    assert said in str(found.value)


def test_variables_that_cannot_be_meant(folder):
    for name, value, said in (
        ("prot", "1", "GRAFT_SERVE_PROT: there is no such option; did you mean 'port'"),
        ("port", "x", "GRAFT_SERVE_PORT: 'x' cannot be meant: "),
        ("api_key", "[a", "a list is written as"),
        ("config", str(folder / "none.yaml"), "does not exist"),
    ):
        with pytest.raises(GraftError) as found:
            read(**{name: value})
        assert said in str(found.value)


def test_every_option_can_be_named():
    names = [name for name, _ in named(COMMAND.make_context("serve", []))]
    assert len(names) == len(set(names)) and {"model", "set", "plugin", "json", "config", "port"} <= set(names)


def test_origins_and_certificates_that_cannot_be_meant(folder):
    load = ModelOptions("m")
    for origin in ("chat.example.com", "https://a/b", "https://a/", ""):
        with pytest.raises(UsageError, match="--allowed-origins takes origins like"):
            ServeOptions(load, allowed_origins=(origin,))
    with pytest.raises(UsageError, match="needs --ssl-certfile"):
        ServeOptions(load, ssl_keyfile="key")
    (folder / "no.pem").write_text("no certificate")
    for file in ("none.pem", "no.pem"):
        with pytest.raises(UsageError, match=r"--ssl-certfile .*\.pem"):
            tls(ServeOptions(load, ssl_certfile=str(folder / file)))


@pytest.fixture(scope="session")
def pair(folder):
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    made = ["req", "-x509", *kind, "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(["openssl", *made, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return key, cert


def test_https_and_cors_from_a_file(folder, pair):
    key, cert = pair
    (folder / "tls.yaml").write_text(
        f"ssl-keyfile: {key}\nssl-certfile: {cert}\nallowed-origins: ['https://page']\napi-key: [k]\n"
    )
    with serving("stub", "--config", folder / "tls.yaml") as server:
        assert server.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=cert)
        with httpx.Client(base_url=server.url, verify=trusted, timeout=PATIENCE) as client:
            asked = {"Origin": "https://page", "Access-Control-Request-Method": "POST"}
            asked["Access-Control-Request-Headers"] = "authorization,content-type,x-api-key,x-stainless-lang"
            before = client.options("/v1/completions", headers=asked)  # without a key, as browsers do
            assert before.status_code == 200
            assert before.headers["access-control-allow-origin"] == "https://page"
            headers = {"Origin": "https://page", "Authorization": "Bearer k"}
            answer = client.post("/v1/completions", json={"prompt": "hi", "stream": True}, headers=headers)
            assert answer.status_code == 200 and "[DONE]" in answer.text
            assert answer.headers["access-control-allow-origin"] == "https://page"
            refused = client.post("/v1/completions", json={}, headers={"Origin": "https://page"})
            assert refused.status_code == 401 and "access-control-allow-origin" in refused.headers
            other = client.get("/version", headers={"Origin": "https://other"})
            assert "access-control-allow-origin" not in other.headers


def test_without_origins_no_page_may_ask():
    with serving("stub", GRAFT_SERVE_SERVED_MODEL_NAME="mine") as server, http_client(server.url) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "mine"
        answer = client.get("/version", headers={"Origin": "https://page"})
        assert not [name for name in answer.headers if name.startswith("access-control")]
        asked = {"Origin": "https://page", "Access-Control-Request-Method": "POST"}
        assert client.options("/v1/completions", headers=asked).status_code == 405
