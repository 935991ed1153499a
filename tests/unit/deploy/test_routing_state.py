"""What a router knows of replicas that failed: nobody is sent to one until it is back."""

from __future__ import annotations

import time

import pytest

from graft.deploy import routing_state
from graft.deploy.routing_state import RoutingState
from graft.engine.kv.events import EventQueue
from graft.engine.kv.manager import BlockManager


def created():
    """The events of a cache that begins."""
    queue = EventQueue()
    BlockManager(8, 4, fingerprint="m", events=queue)
    return [event.to_json() for event in queue.drain()]


@pytest.fixture
def state():
    made = RoutingState()
    made.note_sent("ticket", "a")
    return made


def test_a_replica_that_failed_is_left_out_for_everybody(state):
    assert state.fit(["a", "b"], ()) == ["a", "b"]
    assert state.lose_sent("ticket") == ("a",)
    assert state.fit(["a", "b"], ()) == ["b"]
    assert state.fit(["a", "b"], ["a"]) == ["b"]


def test_one_that_refused_a_request_is_better_than_none_and_a_lost_one_is_not(state):
    assert state.fit(["a", "b"], ["a", "b"]) == ["a", "b"]
    state.lose("a")
    assert state.fit(["a", "b"], ["b"]) == ["b"]
    state.lose("b")
    assert state.fit(["a", "b"], ()) == [], "the request waits until somebody comes"
    assert state.fit(["a", "b", "c"], ()) == ["c"]


def test_a_request_that_was_never_sent_loses_nobody(state):
    assert state.lose_sent("another") == () and state.fit(["a"], ()) == ["a"]


def test_one_whose_cache_begins_anew_is_back(state):
    state.lose("a")
    state.lose("b")
    state.hear({"a": created(), "b": None, "c": []})
    assert state.fit(["a", "b"], ()) == ["a"]
    assert "a" in state.index.replicas


def test_one_that_the_controller_still_names_is_asked_again_in_the_end(state, monkeypatch):
    state.lose("a")
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + routing_state.AWAY - 1)
    assert state.fit(["a"], ()) == []
    monkeypatch.setattr(time, "monotonic", lambda: now + routing_state.AWAY + 1)
    assert state.fit(["a"], ()) == ["a"]
