"""Options of `graft run` and `graft chat`, and what is refused before work is done."""

from __future__ import annotations

import errno
import json
import os
import pty
import subprocess
import sys
from functools import cache
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import graft
from capture_cases import engine as capturing_engine
from conftest import tiny
from graft.base.errors import DiskFull, PromptTooLong, UsageError
from graft.base.files import atomic_folder, write_failed
from graft.cli.app import app
from graft.cli.generate import run as run_verb
from graft.models.load import load_model
from marks import examples


@cache
def llm() -> graft.LLM:
    return graft.LLM(tiny("llama"), backend="eager", max_model_len=40)


def invoke(*args):
    return CliRunner().invoke(app, list(args))


def test_a_wrong_dtype_is_told_before_anything_is_converted(monkeypatch, tmp_path):
    def convert(*args, **options):
        pytest.fail("converted")

    for name in ("embedded_folder", "embedded_gguf", "convert_gguf", "blocks_folder"):
        monkeypatch.setattr(f"graft.models.load.{name}", convert)
    (file := tmp_path / "a.gguf").touch()
    for model in ("smollm2-135m", file):
        for blocks in (False, True):
            with pytest.raises(UsageError, match="unknown dtype 'foo'"):
                load_model(model, dtype="foo", device="cpu", in_blocks=blocks)


def test_wrong_sizes_are_told_before_the_model_is_loaded(monkeypatch):
    monkeypatch.setattr("graft.models.load.load_model", lambda *args, **options: pytest.fail("loaded"))
    for option, value in (("--max-model-len", "0"), ("--kv-cache-memory", "much")):
        told = invoke("run", "hi", option, value)
        assert told.exit_code == 2 and option.removeprefix("--").replace("-", "_") in told.stderr


def test_a_refused_prompt_is_not_printed(capsys):
    def refuse(prompt, params):
        raise PromptTooLong(3, 5000, 2048)

    with pytest.raises(PromptTooLong):
        run_verb.stream(SimpleNamespace(stream=refuse), "The capital", graft.SamplingParams(max_tokens=5000))
    assert capsys.readouterr().out == ""


def test_a_folder_that_cannot_be_written_is_not_called_full(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    unwritable = pytest.raises(DiskFull, match=r"cannot be written: choose another \(GRAFT_CACHE_DIR")
    with unwritable as told, atomic_folder(tmp_path / "file" / "cache"):
        pytest.fail("begun")
    assert "Free space" not in str(told.value)
    for number, advice in ((errno.EACCES, "cannot be written"), (errno.EROFS, "cannot be written")):
        assert advice in str(write_failed("a", OSError(number, os.strerror(number))))
    assert "Free space" in str(write_failed("a", OSError(errno.ENOSPC, "No space left on device")))


class Asked(Exception):
    """The parameters that the command came to."""


NUMBERS = {
    "top_p": st.floats(0.1, 1),
    "top_k": st.integers(0, 50),
    "min_p": st.floats(0, 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.5, 2),
    "n": st.integers(1, 4),
    "logprobs": st.integers(0, 20),
    "seed": st.integers(0, 2**60),
    "max_tokens": st.integers(1, 100),
}


@settings(max_examples=examples(25), deadline=None)
@given(st.fixed_dictionaries({"temperature": st.floats(0.1, 2)}, optional=NUMBERS))
def test_every_sampling_parameter_is_an_option(values):
    def stop(model, progress, **options):
        raise Asked(options)

    args = [f"--{name.replace('_', '-')}={value!r}" for name, value in values.items()]
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_verb, "load_llm", stop)
        made = run_verb.sampling_params
        patch.setattr(run_verb, "sampling_params", lambda *a, **o: seen.append(made(*a, **o)) or seen[-1])
        assert isinstance(invoke("run", "hi", *args).exception, Asked)
    assert seen == [graft.SamplingParams(**{"max_tokens": 64, **values})]


def test_answers_and_log_probabilities_are_shown(monkeypatch):
    monkeypatch.setattr(run_verb, "load_llm", lambda *args, **options: llm())
    common = ("run", "--token-ids", "5,6,7", "--max-tokens", "4", "--seed", "3", "--temperature", "1", "--n", "2")
    params = graft.SamplingParams(max_tokens=4, seed=3, temperature=1.0, n=2, logprobs=2)
    (expected,) = llm().generate([5, 6, 7], params)
    document = json.loads(invoke(*common, "--logprobs", "2", "--json").stdout)
    assert document["outputs"] == json.loads(json.dumps([expected.to_json()]))
    shown = invoke(*common, "--logprobs", "2").stdout
    for each in (expected, *expected.alternatives):
        assert f"→ {each.token_ids}" in shown
        for token, likely in zip(each.token_ids, each.logprobs, strict=True):
            assert f"  {token} {likely[token].logprob:.3f}, rank {likely[token].rank}" in shown
    refused = invoke("run", "--token-ids", "5", "--n", "2")
    assert refused.exit_code == 2 and "n must be 1 when greedy" in refused.stderr


def test_a_context_of_ones_own():
    assert llm().model.context == 40 and len(llm().generate([5] * 30, graft.SamplingParams(max_tokens=10))) == 1
    with pytest.raises(PromptTooLong, match="40"):
        llm().generate([5] * 31, graft.SamplingParams(max_tokens=10))
    longest = tiny("llama").context
    with pytest.raises(
        UsageError, match=f"max_model_len is {longest + 1}, but the model's context has {longest} tokens"
    ):
        graft.LLM(tiny("llama"), max_model_len=longest + 1)
    with pytest.raises(UsageError, match="max_model_len must be a whole number of at least 1, but is 0"):
        graft.LLM(tiny("llama"), max_model_len=0)
    assert tiny("llama").context == longest, "the caller's model is as it was"


def test_the_report_tells_why_the_host_chooses_tokens():
    captured = capturing_engine("llama", True, max_num_seqs=2)
    ways = {
        "penalties": {"presence_penalty": 0.5},
        "log probabilities": {"logprobs": 1},
        "min_tokens": {"min_tokens": 3},
    }
    captured.generate([5, 6], graft.SamplingParams(max_tokens=4))
    assert not any("the host chooses" in note for note in captured.report.notes)
    for reason, options in ways.items():
        captured.generate([5, 6], graft.SamplingParams(max_tokens=4, **options))
        assert any(f"with {reason} the host chooses" in note for note in captured.report.notes)


def test_version_and_completion():
    told = invoke("--version")
    assert told.exit_code == 0 and told.stdout == f"graft {graft.__version__}\n"
    shell = {"_GRAFT_COMPLETE": "complete_bash", "COMP_WORDS": "graft ru", "COMP_CWORD": "1"}
    done = CliRunner().invoke(app, [], prog_name="graft", env=shell)
    assert done.stdout.split() == ["run"]


def test_chat_edits_lines_and_keeps_a_history(tmp_path):
    """Arrow keys move in the line; the next conversation has the lines of this one."""
    program = (
        "import json, sys\nfrom graft.cli.generate.chat import lines\n"
        "for line in lines(False):\n    if line == b'end\\n':\n        break\n"
        "    print(json.dumps(line.decode()), file=sys.stderr, flush=True)\n"
    )
    environment = {**os.environ, "GRAFT_CACHE_DIR": str(tmp_path), "TERM": "xterm"}
    told = []
    for keys in (b"helo\x1b[Dl\nend\n", b"\x1b[A\x1b[A!\nend\n"):
        ours, theirs = pty.openpty()
        child = subprocess.Popen(
            [sys.executable, "-c", program], stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment
        )
        os.write(ours, keys)
        told.append([json.loads(line) for line in child.communicate(timeout=120)[1].decode().splitlines()])
        os.close(ours), os.close(theirs)
    assert told == [["hello\n"], ["hello!\n"]]
    assert (tmp_path / "chat_history").stat().st_mode & 0o077 == 0
