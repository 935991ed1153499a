"""The engine process: what goes wrong in it is answered, or ends it; never silence."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace

import pytest

from graft.base.errors import UsageError
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
    made = Worker(SimpleNamespace(), Outbox(near))
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
