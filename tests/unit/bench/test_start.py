"""Starts of new processes: what they say is read, and one that fails is told in a line."""

from __future__ import annotations

import json
import os

import pytest
from typer.testing import CliRunner

from graft.base.errors import GraftError
from graft.bench import start
from graft.bench.start import Start, StartTable, run
from graft.cli.app import app

NOW = "import time; print(time.monotonic())"


def test_a_process_says_when_its_token_was_there_and_what_else_there_is():
    seconds, said = run('print(\'{"token": [3], "phases": {"imports": 0.5}}\'); ' + NOW, {"model": "m"}, os.environ)
    assert seconds > 0 and said == {"token": [3], "phases": {"imports": 0.5}}
    assert run(NOW, {"model": "m"}, os.environ)[1] == {}


def test_a_process_that_fails_is_told_by_its_last_line():
    with pytest.raises(GraftError, match="a start of m failed: ValueError: no such thing"):
        run("raise ValueError('no such thing')", {"model": "m"}, os.environ)


def test_kinds_are_set_beside_the_imports(monkeypatch):
    """Cold once, then the others in turns, the compiled engine from the folder that was saved."""
    asked = []

    def play(program, what, environment):
        asked.append((program, what["model"], what.get("save")))
        assert "GRAFT_NATIVE_CACHE_DIR" not in environment
        return {start.IMPORTS: 2.0, start.HUGGING_FACE: 5.0}.get(program, 3.0), {
            "token": [1], "backend": "native", "device": "cpu", "phases": {"imports": 1.0},
        }  # fmt: skip

    monkeypatch.setattr(start, "run", play)
    monkeypatch.setenv("GRAFT_NATIVE_CACHE_DIR", "/elsewhere")
    table = start.measure_starts("m", dtype="auto", device="cpu", quantize=None, repeats=2)
    saved = asked[1][2]
    assert asked[0] == (start.GRAFT, "m", None) and saved
    assert [one[0] for one in asked[2:6]] == [start.IMPORTS, start.HUGGING_FACE, start.GRAFT, start.GRAFT]
    assert [one[1] for one in asked[2:6]] == ["m", "m", "m", saved] and len(asked) == 10
    data = table.to_data()
    assert data["imports_seconds"] == 2.0 and data["starts"]["compiled engine"]["of_imports"] == 1.5
    assert data["starts"]["cold"]["seconds"] == (3.0,) and data["backend"] == "native"


def test_the_command_prints_a_table_or_a_document(monkeypatch):
    said = {"token": [1], "backend": "native", "device": "cpu", "phases": {"imports": 1.0}}
    monkeypatch.setattr(start, "run", lambda *_: (3.0, said))
    words = ["bench", "tiny-llama", "--start", "--repeats", "1", "--device", "cpu"]
    told = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert told["schema"] == "bench-start/1" and told["starts"]["warm"]["median"] == 3.0
    plain = CliRunner().invoke(app, words)
    assert plain.exit_code == 0 and "compiled engine" in plain.stdout


def test_another_token_is_an_error(monkeypatch):
    tokens = iter(range(100))
    said = lambda: {"token": [next(tokens)], "backend": "native", "device": "cpu"}  # noqa: E731
    monkeypatch.setattr(start, "run", lambda *_: (1.0, said()))
    with pytest.raises(GraftError, match="another token"):
        start.measure_starts("m", dtype="auto", device="cpu", quantize=None, repeats=1)


def test_medians():
    table = StartTable("m", (Start("warm", (9.0, 4.0, 5.0), {}),), 2.0, {})
    assert table.to_data()["starts"]["warm"]["median"] == 5.0
