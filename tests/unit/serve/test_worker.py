"""The engine process: what goes wrong in it is answered, or ends it; never silence."""

from __future__ import annotations

import os
import socket
import threading
from types import SimpleNamespace

import pytest

from graft.base.errors import UsageError
from graft.engine.kv.events import EventQueue, Removed
from graft.serve.wire import AnswerRow, messages
from graft.serve.worker import BROKEN, Outbox, Worker


class ProcessEnded(BaseException):
    pass


@pytest.fixture
def worker(monkeypatch):
    """With an engine of nothing. The end of the process is an exception that nobody catches."""

    def end(status):
        raise ProcessEnded(status)

    monkeypatch.setattr(os, "_exit", end)
    near, far = socket.socketpair()
    manager = SimpleNamespace(events=EventQueue())
    made = Worker(SimpleNamespace(engine=SimpleNamespace(pooling=None, manager=manager)), Outbox(near))
    made.far = far
    yield made
    near.close()
    far.close()


@pytest.mark.parametrize(("error", "status"), [(ValueError("a defect"), BROKEN), (BrokenPipeError(), 0)])
@pytest.mark.parametrize("thread", [("send_forever",), ("send_events", 1, ())])
def test_a_sender_that_ends_ends_the_process(worker, thread, error, status, capsys):
    def fail(*_, **__):
        raise error

    worker.outbox.due = worker.outbox.send = fail
    name, *arguments = thread
    with pytest.raises(ProcessEnded) as found:
        getattr(worker, name)(*arguments)
    assert found.value.args == (status,)
    assert ("ValueError: a defect" in capsys.readouterr().err) == (status == BROKEN)


def test_a_request_that_cannot_be_made_is_answered_whatever_the_error(worker, capsys):
    errors = [UsageError("refused"), ValueError("a defect")]
    worker.llm.request = lambda *_: (_ for _ in ()).throw(errors.pop(0))
    worker.llm.abort = lambda *_: None
    worker.take({"submit": [{"id": number, "prompt": [5], "params": 0} for number in (7, 8)], "params": [{}]})
    sent = messages(worker.far)
    rows = [AnswerRow.parse(row) for _ in range(2) for row in next(sent)["rows"]]
    assert [(row.id, row.finish_reason, row.error) for row in rows] == [
        (7, "error", "refused"), (8, "error", "ValueError: a defect"),
    ]  # fmt: skip
    assert "ValueError: a defect" in capsys.readouterr().err and not worker.open


class Made:
    """A request, as far as it is looked at."""

    family, cached = (), None


def compiling(worker):
    """A request whose grammar takes until the first of these events is set, and what then entered."""
    go, entered = threading.Event(), []
    worker.llm.request = lambda *_: go.wait(60) and Made()
    worker.llm.driver = SimpleNamespace(enter=lambda requests, sent: entered.append(sent.number))
    worker.llm.abort = lambda *_: None
    worker.take({"submit": [{"id": 7, "prompt": [5], "params": 0}], "params": [{"grammar": "x"}]})
    return go, entered


def test_a_grammar_is_compiled_beside_other_requests(worker):
    go, entered = compiling(worker)
    assert worker.compiling == {7} and not entered  # `take` came back: others can be taken
    go.set()
    worker.compiler.shutdown()
    assert entered == [7] and set(worker.open) == {7} and not worker.compiling


@pytest.mark.parametrize("word", ["abort", "expire"])
def test_who_leaves_while_a_grammar_is_compiled_never_enters(worker, word):
    go, entered = compiling(worker)
    worker.take({word: [7]})
    go.set()
    worker.compiler.shutdown()
    assert not entered and not worker.open and not worker.dropped and not worker.compiling
    if word == "expire":
        (row,) = next(messages(worker.far))["rows"]
        assert AnswerRow.parse(row).finish_reason == "abort"


def test_parameters_that_cannot_be_are_answered(worker):
    worker.llm.abort = lambda *_: None
    worker.take({"submit": [{"id": 7, "prompt": [5], "params": 0}], "params": [{"temperature": -1}]})
    (row,) = next(messages(worker.far))["rows"]
    assert "temperature" in AnswerRow.parse(row).error


def test_events_that_nobody_reads_are_not_kept(worker):
    """Each has the tokens of its blocks; who subscribes has a queue of his own."""
    queue = worker.llm.engine.manager.events
    reader = queue.branch()
    for number in range(10):
        queue.put(Removed.of, [SimpleNamespace(hash=str(number))])
    assert not queue.backlog and queue.next_id == 10
    assert [event.hashes for event in reader.drain()] == [(str(number),) for number in range(10)]
    lost, *_ = queue.drain()
    assert (lost.count, lost.first, lost.last) == (10, 0, 9), "a late reader is told what it missed"
    queue.put(Removed.of, [SimpleNamespace(hash="11")])
    assert len(queue.drain()) == 1
