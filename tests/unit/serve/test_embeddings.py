"""/v1/embeddings: what is asked, what comes, and what is refused, over an engine process without a model."""

from __future__ import annotations

import base64
import math
import struct

import pytest

from serve_cases import http_client, poll, sent, serving
from stub_engine import CONTEXT, HANG


@pytest.fixture(scope="module")
def client():
    with serving("embedder", "--runner", "pooling", "--max-num-seqs", 8) as server, http_client(server.url) as found:
        yield found


def embed(client, given, **more):
    return client.post("/v1/embeddings", json={"input": given, **more})


def vectors(answer):
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    assert all(one["object"] == "embedding" for one in data)
    return [one["embedding"] for one in data]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([10, 20], [[2, 20, 1, 0]]),
        ([[10, 20], [7]], [[2, 20, 1, 0], [1, 7, 1, 0]]),
        ("<|im_end|>", [[1, 2, 1, 0]]),
        (["<|im_end|>", "<|im_start|><|im_end|>"], [[1, 2, 1, 0], [2, 2, 1, 0]]),
    ],
)
def test_every_form_of_input_is_taken_in_its_order(client, given, expected):
    answer = embed(client, given, model="embedder", user="me")
    assert vectors(answer) == expected
    tokens = sum(one[0] for one in expected)
    assert answer.json()["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert answer.json()["object"] == "list" and answer.json()["model"] == "embedder"
    coded = vectors(embed(client, given, encoding_format="base64"))
    assert [list(struct.unpack("<4f", base64.b64decode(one))) for one in coded] == expected


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "input", "must be a string"),
        ({"input": []}, "input", "must be a string"),
        ({"input": [[]]}, "input", "input 0 has no tokens"),
        ({"input": ["hi", ""]}, "input", "input 1 has no tokens"),
        ({"input": [10, "x"]}, "input", "a list of token ids"),
        ({"input": {"a": 1}}, "input", "must be a string"),
        ({"input": [300]}, "input", "outside the vocabulary"),
        ({"input": [7] * (CONTEXT + 1)}, "input", f"{CONTEXT + 1} tokens"),
        ({"input": ["x"] * 2049}, "input", "may have 2048 texts"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", "float or base64"),
        ({"input": "x", "encoding_format": ["float"]}, "encoding_format", "float or base64"),
        ({"input": "x", "dimensions": 2}, "dimensions", "is_matryoshka"),
        ({"input": "x", "dimensions": 0}, "dimensions", "whole number"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "1 or more, or -1"),
        ({"input": "x", "truncation_side": "end"}, "truncation_side", "left or right"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_its_field(client, body, param, said):
    answer = client.post("/v1/embeddings", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param and said in answer.json()["error"]["message"]


def test_its_own_width_is_no_cut_and_another_name_is_none(client):
    assert vectors(embed(client, [10, 20], dimensions=4)) == [[2, 20, 1, 0]]
    assert embed(client, [10], model="other").status_code == 404


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_each_kind_of_server_says_how_to_start_the_other(client, path):
    body = {"prompt": "x", "input": "x", "messages": [{"role": "user", "content": "x"}]}
    answer = client.post(path, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "unsupported_endpoint"
    assert "without --runner pooling" in answer.json()["error"]["message"]


def test_vectors_are_cut_where_the_model_says_so():
    with serving("matryoshka", "--runner", "pooling") as server, http_client(server.url) as client:
        length = math.sqrt(2 * 2 + 20 * 20)
        assert vectors(embed(client, [10, 20], dimensions=2))[0] == pytest.approx([2 / length, 20 / length])
        coded = vectors(embed(client, [10, 20], dimensions=2, encoding_format="base64"))[0]
        assert struct.unpack("<2f", base64.b64decode(coded)) == pytest.approx((2 / length, 20 / length))
        wrong = embed(client, [10, 20], dimensions=3)
        assert wrong.status_code == 400 and "one of 2" in wrong.json()["error"]["message"]


def test_a_client_that_leaves_is_forgotten_and_the_log_has_no_text(tmp_path):
    options = ("embedder", "--runner", "pooling")
    with (
        (tmp_path / "log").open("w") as log,
        serving(*options, errors=log) as server,
        http_client(server.url) as client,
    ):
        assert embed(client, "secret").status_code == 200
        with sent(server.url, {"input": [HANG, 5]}, path="/v1/embeddings"):
            poll(lambda: client.get("/health").json()["running"] == 1)
        poll(lambda: client.get("/health").json()["running"] == 0)
        metrics = client.get("/metrics").text
        assert 'vllm:request_success_total{model_name="embedder",finished_reason="abort"} 1' in metrics
        assert 'finished_reason="stop"} 2' in metrics  # the first request of every server is one
    said = (tmp_path / "log").read_text()
    assert "/v1/embeddings" in said and "secret" not in said
