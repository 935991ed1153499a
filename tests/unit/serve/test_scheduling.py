"""vLLM's `priority`: from a body to the engine, where the server was started for it; and `cache_salt`, a 400."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest
from httpx import Client

from graft.base.errors import HttpRefused, UsageError
from graft.engine.kv.events import EventQueue
from graft.engine.params import SamplingParams
from graft.serve.options import ModelOptions, ServeOptions
from graft.serve.protocol.messages import message_request
from graft.serve.protocol.scheduling import MOST, check_priority
from graft.serve.protocol.token_requests import token_request
from graft.serve.wire import submission
from graft.serve.worker import Outbox, Worker
from protocol_cases import MESSAGES, NAMES, chat, completion, refused, respond
from serve_cases import complete, http_client, serving


def message(**body):
    return message_request({"messages": MESSAGES, "max_tokens": 4, **body}, NAMES)


def tokens(**body):
    return token_request({"token_ids": [5], "sampling_params": {"max_tokens": 4}, **body}, NAMES, 300)


ENDPOINTS = pytest.mark.parametrize("ask", [completion, chat, respond, message, tokens])


@ENDPOINTS
@pytest.mark.parametrize("asked", [3, 0, -MOST, None])
def test_every_endpoint_has_it(ask, asked):
    assert ask(priority=asked).priority == (asked or 0) and ask().priority == 0


@ENDPOINTS
@pytest.mark.parametrize(
    "body",
    [{"priority": "high"}, {"priority": 1.5}, {"priority": True}, {"priority": MOST + 1}, {"cache_salt": "me"}],
)
def test_what_is_wrong_is_named(ask, body):
    (param,) = body
    error = refused(lambda: ask(**body))
    assert (error.status, error.param) == (400, param) and param in str(error)
    assert ask(cache_salt="").priority == ask(cache_salt=None).priority == 0


def test_a_server_that_was_not_started_for_it_says_so():
    check_priority(0, "fcfs")
    check_priority(-5, "priority")
    with pytest.raises(HttpRefused, match="--scheduling-policy priority"):
        check_priority(1, "fcfs")
    with pytest.raises(UsageError, match="--scheduling-policy must be fcfs or priority, but is 'lifo'"):
        ServeOptions(ModelOptions("m"), scheduling_policy="lifo")


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_over_http(policy):
    with serving("chat", "--scheduling-policy", policy) as server, http_client(server.url) as client:
        assert_answers(client, policy)


def assert_answers(client: Client, policy: str) -> None:
    answer = complete(client, [20], max_tokens=2, priority=-1, return_token_ids=True).json()
    if policy == "priority":
        assert answer["choices"][0]["token_ids"] == [21, 22]
    else:
        assert (answer["error"]["param"], answer["error"]["code"]) == ("priority", "unsupported_parameter")
    assert complete(client, [20], max_tokens=2, priority=0).status_code == 200


def test_the_engine_gets_it():
    near, far = socket.socketpair()
    given = []
    engine = SimpleNamespace(pooling=None, manager=SimpleNamespace(events=EventQueue()))
    llm = SimpleNamespace(engine=engine, driver=SimpleNamespace(enter=lambda *_: None), abort=lambda *_: None)
    llm.request = lambda prompt, params, priority: given.append((prompt, priority))
    llm.embedding_request = lambda prompt, priority: given.append((prompt, priority))
    worker = Worker(llm, Outbox(near))
    params = [SamplingParams(max_tokens=1)] * 2
    worker.take(submission([1, 2], [[5], [6]], params, -7))
    worker.take(submission([3], [[7]], params[:1]))
    engine.pooling = "mean"
    worker.take(submission([4], [[8]], params[:1], 9))
    assert given == [([5], -7), ([6], -7), ([7], 0), ([8], 9)]
    near.close()
    far.close()
