"""Keys, logs, metrics, frames and options of the server."""

from __future__ import annotations

import asyncio
import io
import json
import re
import socket
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from graft.base.errors import TokenizerRefused, UsageError
from graft.cli.app import app
from graft.engine.params import SamplingParams
from graft.serve.cache_events import EventReader
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


def lost_event(number, first):
    return {"type": "lost", "event_id": number, "count": number - first, "first": first, "last": number - 1}


def test_a_reader_of_events_is_late_only_where_it_does_not_read():
    async def go():
        stored = [{"type": "stored", "event_id": number} for number in range(6, 70_006)]
        reader = EventReader()
        reader.add([lost_event(5, 5), *stored])  # a state of more records than may wait
        assert reader.error is None and len(reader.waiting) == 70_001
        reader.add([lost_event(70_006, 70_006), {"type": "created", "event_id": 70_007}])  # another reader has come
        assert await reader.read() == [lost_event(70_006, 0), {"type": "created", "event_id": 70_007}]
        reader.add([{"type": "stored", "event_id": 70_008}, lost_event(70_009, 70_009)])
        assert await reader.read() == [lost_event(70_009, 70_008)]
        reader.add(stored)
        assert reader.error is None
        reader.add(stored[:1])
        assert reader.error is not None and not reader.waiting
        reader.add(stored)
        assert not reader.waiting

    asyncio.run(go())


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
