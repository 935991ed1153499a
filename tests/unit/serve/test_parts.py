"""Keys, logs, metrics, frames and options of the server."""

from __future__ import annotations

import asyncio
import io
import json
import re
import socket
import sys
import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from cache_model import run
from graft.base.errors import EngineGone, TokenizerRefused, UsageError
from graft.cli.app import app
from graft.engine.kv.events import Created, EventQueue, Lost, Stored, StoredBlock
from graft.engine.kv.manager import BlockManager
from graft.engine.kv.view import CacheView
from graft.engine.params import SamplingParams
from graft.serve import cache_events
from graft.serve.cache_events import CacheFeed, EventReader
from graft.serve.dashboard import BlockMap
from graft.serve.keys import ApiKeys
from graft.serve.logs import ServerLog
from graft.serve.metrics import Histogram, Metrics
from graft.serve.options import ModelOptions, ServeOptions, options_from
from graft.serve.text import ServedText
from graft.serve.wire import EngineLoad, ServedModel, frame, messages, submission
from serve_cases import poll, tokenizer_json


def test_keys_from_everywhere(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# of the team\n\nfrom-file \n")
    keys = ApiKeys(["given"], str(file), {"GRAFT_API_KEY": "from-environment"})
    for key in ("given", "from-file", "from-environment"):
        assert keys.allow(f"Bearer {key}".encode()) and keys.allow(f"bearer  {key} ".encode())
    for key in ("", "give", "given2", "#", "# of the team", "\xff"):
        assert not keys.allow(f"Bearer {key}".encode("latin-1")), key
    assert not any(map(keys.allow, (b"", b"given", b"Basic given", b"Bearer")))
    assert b"given" not in repr(vars(keys)).encode()  # hashes alone are kept


def test_a_file_of_keys_that_changes(tmp_path):
    file = tmp_path / "keys"
    file.write_text("old")
    keys = ApiKeys([], str(file), {})
    file.write_text("newer")
    assert keys.allow(b"Bearer newer") and not keys.allow(b"Bearer old")
    file.unlink()
    assert keys.allow(b"Bearer newer")  # gone for a moment: as it was
    file.write_text("")
    assert not keys.allow(b"Bearer newer") and not keys.allow(b"Bearer ")  # empty: nobody, not everybody


def test_keys_that_cannot_be_meant(tmp_path):
    (tmp_path / "empty").write_text("# none\n")
    for given_keys, file in (([" "], None), ([], str(tmp_path / "none")), ([], str(tmp_path / "empty"))):
        with pytest.raises(UsageError):
            ApiKeys(given_keys, file, {})
    assert ApiKeys([], None, {}).allow(b"")


def test_a_log_that_cannot_be_written_stops_nobody():
    class Full(io.StringIO):
        def write(self, _text):
            raise OSError(28, "No space left on device")

    log = ServerLog(False, Full())
    log("request", id=1)
    poll(lambda: log.lost == 1)


def test_lines_stay_lines():
    out = io.StringIO()
    log = ServerLog(False, out)
    log("note", what="two\nlines", none=None)
    log.flush()
    assert out.getvalue().count("\n") == 1 and 'what="two\\nlines"' in out.getvalue() and "none" not in out.getvalue()


@given(st.lists(st.floats(0, 100), max_size=30))
def test_a_histogram_is_cumulative(seen):
    histogram = Histogram((0.5, 1.0, 10.0))
    for value in seen:
        histogram.observe(value)
    lines = list(histogram.lines("x", 'a="b"'))
    counts = [int(line.split()[-1]) for line in lines[:4]]
    assert counts == [sum(value <= bound for value in seen) for bound in (0.5, 1.0, 10.0, float("inf"))]
    assert lines[-1] == f'x_count{{a="b"}} {len(seen)}'


def test_metrics_are_in_the_format_of_prometheus():
    metrics = Metrics(prompt_tokens=3)
    metrics.finish("length")
    metrics.refuse(429)
    text = metrics.text('na"me\n', EngineLoad(running=1, blocks=4, used_blocks=1), 2)
    for line in text.splitlines():
        assert re.fullmatch(r"# TYPE [a-z0-9_:]+ (gauge|counter|histogram)|[a-z0-9_:]+\{.*\} [-+.0-9e]+", line), line
    assert 'vllm:kv_cache_usage_perc{model_name="na\\"me\\n"} 0.25' in text
    assert 'graft:requests_refused_total{model_name="na\\"me\\n",status="429"} 1' in text


@given(st.lists(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=5), max_size=3), max_size=5))
def test_frames_come_as_they_were_sent(given_messages):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=lambda: [ours.sendall(frame(one)) for one in given_messages])
        sender.start()
        sender.join()
        ours.sendall(frame({"cut": "short"})[:-2])
        ours.shutdown(socket.SHUT_WR)
        assert list(messages(theirs)) == given_messages  # half a message is none


def test_parameters_that_are_equal_are_sent_once():
    many = SamplingParams(temperature=1.0, logit_bias={token: 1.0 for token in range(1024)}, stop=["a"])
    params = [many] * 500 + [SamplingParams(temperature=1.0, logit_bias=many.logit_bias, stop="a")] * 499
    sent = frame(submission(range(1000), [[1]] * 1000, [*params, SamplingParams()]))
    assert len(sent) < 100_000
    found = json.loads(sent[4:])
    assert [one["params"] for one in found["submit"]] == [0] * 999 + [1]
    assert [SamplingParams(**one) for one in found["params"]] == [many, SamplingParams()]


CREATED = Created(0, 0.0, (100_000,), 1, "00")


def stored(number):
    return Stored(number, 0.0, None, (StoredBlock(f"{number:x}", (number,)),))


def followed(reader):
    """A feed with this reader, and what it asks the engine for."""
    asked = []
    feed = CacheFeed(asked.append)
    feed.follow(reader)
    return feed, asked


def test_readers_have_their_own_numbers_and_one_subscription():
    one, other = EventReader(), EventReader()
    feed, asked = followed(one)
    assert one.take() == []  # the state has not come
    feed.take(1, [CREATED, stored(1)])
    assert [(event.event_id, type(event)) for event in one.take()] == [(0, Created), (1, Stored)] and one.take() == []
    feed.follow(other)
    assert other.bell.is_set() and asked == [1]
    feed.take(1, [stored(2)])
    assert one.take() == [stored(2)]
    state = other.take()
    assert [event.event_id for event in state] == [0, 1, 2] and isinstance(state[0], Created)
    feed.take(1, [stored(3)])
    assert [event.event_id for event in other.take()] == [3]
    feed.leave(one)
    assert asked == [1]
    feed.leave(other)
    feed.follow(one)
    assert asked == [1, None, 2]
    feed.take(1, [stored(4)])  # of before: it would be out of order
    feed.take(2, [CREATED])
    assert feed.view.blocks == {}


def test_a_reader_that_is_late_gets_the_state(monkeypatch):
    monkeypatch.setattr(cache_events, "MOST", 3)
    reader, view = EventReader(), CacheView()
    feed, _ = followed(reader)
    feed.take(1, [CREATED])
    for event in reader.take():
        view.apply(event)
    for number in range(1, 12):
        feed.take(1, [stored(number)])
        assert len(reader.waiting) <= 4
    found = reader.take()
    assert (found[0].count, found[0].first, found[0].last) == (11, 1, 11) and isinstance(found[1], Created)
    feed.take(1, [Lost(14, 0.0, 2, 12, 13), replace(CREATED, event_id=15), stored(16)])  # the engine's own
    found += reader.take()
    for event in found:
        view.apply(event)  # in order, without gaps
    assert list(view.blocks) == ["10"]


def test_blocks_keep_their_cells():
    blocks = BlockMap()
    assert blocks.news() == {"reset": True, "total": 0, "block_size": 0, "changed": []}
    view, events = CacheView(), EventQueue()
    manager = BlockManager(4, 2, events=events)
    first = run(manager, [1, 2, 3, 4, 5])

    def news():
        for event in events.drain():
            view.apply(event)
            blocks.apply(event)
        assert len(blocks.cells) == len(view.blocks) and len(blocks.free) == 4 - len(view.blocks)
        return blocks.news()

    assert news() == {"reset": True, "total": 4, "block_size": 2, "changed": [[0, 2, -1, 1], [1, 2, 0, 1]]}
    manager.close(first)
    assert news()["changed"] == [[0, 1, -1, 1], [1, 1, 0, 1]]
    again = run(manager, [1, 2, 9, 9, 9])
    assert news()["changed"] == [[0, 2, -1, 2], [2, 2, 0, 1]]
    manager.close(again)
    manager.close(run(manager, [6, 6, 7, 7, 8, 8, 8]))
    assert news()["changed"][0] != [0, 2, -1, 2] and news()["changed"] == []


def test_blocks_in_host_memory_keep_their_cells():
    blocks, events = BlockMap(), EventQueue()
    manager = BlockManager(2, 2, host_blocks=3, events=events)
    for tokens in ([1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4]):
        manager.close(run(manager, tokens))
    for event in events.drain():
        blocks.apply(event)
    assert len(blocks.cells) == len(manager.stored) == 4 and len(blocks.free) == 1


def test_readers_are_told_when_the_engine_is_gone():
    reader = EventReader()
    feed, asked = followed(reader)
    feed.fail(EngineGone("it died"))
    with pytest.raises(EngineGone, match="it died"):
        asyncio.run(reader.read())
    feed.leave(reader)
    assert asked == [1, None] and not feed.readers


def test_a_tokenizer_that_is_another_one_is_refused():
    made = ServedModel("m", 64, 300, 100, 4, tokenizer_json(), None, {}, [("hi", [1, 2], "hi")])
    with pytest.raises(TokenizerRefused, match="other tokens for 'hi'"):
        ServedText(made)


def test_options():
    load = ModelOptions("models/some-model/")
    assert ServeOptions(load).names == ("some-model",)
    assert ServeOptions(load, served_model_name=("a", "b")).names == ("a", "b")
    wrong = [("port", 70_000), ("port", -1), ("max_body_size", 0), ("stall_timeout", 0.0), ("drain_timeout", -1)]
    for name, value in wrong:
        with pytest.raises(UsageError, match=name.replace("_", "-")):
            ServeOptions(load, **{name: value})
    flat = {"model": "m", "port": 1, "api_key": ["k"], "served_model_name": None, "sets": None, "plugins": None}
    found = options_from({**flat, "max_num_seqs": 3})
    assert found == ServeOptions(ModelOptions("m", engine={"max_num_seqs": 3}), port=1, api_key=("k",))
    assert json.loads(json.dumps(found.load.engine)) == found.load.engine  # it goes over the socket


def test_without_the_extra_the_command_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "graft.serve.run", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)  # as if it were not installed
    result = CliRunner().invoke(app, ["serve", "tiny-llama"])
    assert result.exit_code == 2 and "pip install 'graft[serve]'" in result.stderr
