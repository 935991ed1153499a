"""The connection to an engine process that was killed, before its end is known."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from graft.base.errors import EngineGone
from graft.engine.params import SamplingParams
from graft.serve.link import EngineLink
from graft.serve.state import ServerState


class ClosedWriter:
    """As uvloop's: a write to it is an error."""

    closed = True

    def is_closing(self):
        return self.closed

    def write(self, data):
        if self.closed:
            raise RuntimeError("unable to perform operation; the handler is closed")


@pytest.fixture
def link():
    options = SimpleNamespace(max_queued_requests=4, max_queue_time=0, scheduling_policy="fcfs")
    metrics = SimpleNamespace(
        prompt_length=SimpleNamespace(observe=lambda _: None), prompt_tokens=0, finish=lambda _: None
    )
    made = EngineLink(options, metrics, lambda *_, **__: None)
    made.gone, made.model, made.writer = None, SimpleNamespace(max_num_seqs=4), ClosedWriter()
    return made


def test_a_request_to_a_closed_connection_is_told_that_the_engine_is_gone(link):
    with pytest.raises(EngineGone, match="the engine process ended; try again later"):
        link.submit([[1, 2]], [SamplingParams()], follow=False)
    assert not link.open, "nothing waits for an answer"
    with pytest.raises(EngineGone, match="the engine process ended"):
        link.ask_events(3)
    link.ask_events(None)


def test_an_engine_that_is_started_again_is_loading_and_not_dead(link):
    """Who asks /health whether to kill the server would never let it load."""
    state = ServerState(SimpleNamespace(stall_timeout=300), link, None, None, None, warm=True)

    def health():
        alive, told = state.health()
        return alive, told["status"]

    link.loading = False
    assert health() == (True, "ready")
    link.gone = "the engine process was killed by SIGKILL"
    assert health() == (False, "dead")
    link.begin()
    state.warm = False
    assert health() == (True, "loading") and link.model is None
    link.loading, link.gone = False, "the engine process was killed by SIGKILL"
    assert health() == (False, "dead"), "while it loaded"


def test_whoever_leaves_then_is_forgotten(link):
    link.writer.closed = False
    ticket = link.submit([[1, 2]], [SamplingParams()], follow=False)
    assert link.open == 1
    link.writer.closed = True
    link.expire(ticket)
    link.close(ticket)
    assert not link.open and not ticket.expired
