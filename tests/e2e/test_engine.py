"""The engine on the real model: the same tokens whatever runs beside, chat, stop strings, events."""

from __future__ import annotations

import json

import pytest
from click.testing import Result
from typer.testing import CliRunner

import graft
from conftest import embedded, resized
from graft.base.errors import UsageError
from graft.cli.app import app
from marks import short

SYSTEM = (
    "You are a careful assistant. Answer in one short sentence, name your source where you have one, and say so"
    " plainly when you do not know the answer. Never invent facts.\n"
)
PROMPTS = [
    SYSTEM + "Question: how high is Mount Everest? Answer:",
    "def quicksort(items):",
    SYSTEM + "Question: who wrote Hamlet? Answer:",
    "The chemical formula of water is",
    SYSTEM + "Question: what is a prime number? Answer:",
    "In 1969,",
]
GREEDY = [graft.SamplingParams(max_tokens=6 + 2 * i, ignore_eos=True) for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def llm():
    return embedded()


@pytest.fixture(scope="module")
def alone(llm):
    """Each by itself, nothing reused."""
    llm = resized(llm, enable_prefix_caching=False)
    return [llm.generate(prompt, params)[0].token_ids for prompt, params in zip(PROMPTS, GREEDY, strict=True)]


@pytest.mark.exhaustive  # the short run: test_batch_invariance.py
def test_tokens_do_not_depend_on_batch_reuse_chunks_or_preemption(llm, alone):
    assert [o.token_ids for o in llm.generate(PROMPTS, GREEDY)] == alone
    again = llm.generate(PROMPTS[::-1], GREEDY[::-1])
    assert [o.token_ids for o in again[::-1]] == alone
    assert sum(o.cached_tokens for o in again) > 64
    block = llm.engine.cache_bytes // llm.engine.manager.blocks
    small = resized(llm, kv_cache_memory=7 * block, max_num_batched_tokens=20, admission="greedy")
    assert [o.token_ids for o in small.generate(PROMPTS, GREEDY)] == alone
    assert small.stats.preemptions > 0 and small.engine.manager.available == 7


def test_a_stop_string_ends_text_and_stream_alike(llm):
    prompt = "The days of the week are: Monday, Tuesday,"
    free = llm.generate(prompt, graft.SamplingParams(max_tokens=24))[0].text
    assert "Friday" in free
    params = graft.SamplingParams(max_tokens=24, stop=["Friday", "zebra"])
    (output,) = llm.generate(prompt, params)
    assert output.text == free[: free.index("Friday")] and output.finish_reason == "stop"
    assert output.stop_reason == "Friday"
    assert "".join(llm.stream(prompt, params)) == output.text


def test_samples_of_one_prompt_share_it_and_differ(llm):
    params = graft.SamplingParams(max_tokens=10, temperature=1.0, n=3, seed=4, logprobs=2)
    (output,) = llm.generate("My favourite animal is", params)
    samples = [output, *output.alternatives]
    assert len({tuple(s.token_ids) for s in samples}) == 3
    assert all(s.text and len(s.logprobs) == len(s.token_ids) for s in samples)
    single = graft.SamplingParams(max_tokens=10, temperature=1.0, seed=5)
    assert llm.generate("My favourite animal is", single)[0].token_ids == samples[1].token_ids


def test_a_conversation_reuses_what_was_said(llm):
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    params = graft.SamplingParams(max_tokens=12)
    first = llm.chat(messages, params)
    assert "Paris" in first.text
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And of Spain?"}]
    assert llm.chat(messages, params).cached_tokens >= 32


def test_text_that_is_none_is_refused(llm):
    outputs = llm.generate(["\udcff", "Hello", b"caf\xe9"], graft.SamplingParams(max_tokens=2))
    assert [o.finish_reason for o in outputs] == ["error", "length", "error"]
    assert "not valid text" in str(outputs[0].error) and "not valid text" in str(outputs[2].error)


def graft_command(*args: str, stdin: bytes = b"") -> Result:
    """In this process: importing torch and transformers once more takes seconds."""
    return CliRunner().invoke(app, list(args), input=stdin)


@pytest.mark.exhaustive
def test_graft_events_tells_the_life_of_the_cache():
    told = graft_command("events", "tiny-llama", "--json")
    assert told.exit_code == 0, told.output
    events = [json.loads(line) for line in told.stdout.splitlines()]
    assert [e["event_id"] for e in events] == list(range(len(events)))
    assert {e["type"] for e in events} == {"created", "stored", "updated"}
    table = graft_command("events", "tiny-llama").stdout
    assert "prompt 2: 32 of 41 tokens from the cache" in table and "stored" in table


@pytest.mark.parametrize("loads", short([True, False], False))
def test_graft_chat_answers_lines_and_keeps_the_conversation(llm, monkeypatch, loads):
    if not loads:  # what the command loads itself is in 8 and 4 bits, as the file has it
        monkeypatch.setattr("graft.cli.generate.chat.load_llm", lambda *args, **options: llm)
    asked = b"My name is Ada. Say hello.\n\nWhat is my name?\n/reset\nHi\n/exit\nnot read\n"
    told = graft_command("chat", "--max-tokens", "6", "--json", stdin=asked)
    assert told.exit_code == 0, told.output
    answers = [json.loads(line) for line in told.stdout.splitlines()]
    assert len(answers) == 3 and all(a["answer"] for a in answers)
    assert answers[1]["cached_tokens"] >= 16 and answers[1]["prompt_tokens"] > answers[2]["prompt_tokens"]


def test_a_line_that_cannot_be_answered_is_told_and_chat_goes_on(llm, monkeypatch):
    monkeypatch.setattr("graft.cli.generate.chat.load_llm", lambda *args, **options: llm)
    asked = b"caf\xe9\n/rest\n" + b"word " * 9000 + b"\nHi\n"
    told = graft_command("chat", "--max-tokens", "4", "--json", stdin=asked)
    first, second, answer = map(json.loads, told.stdout.splitlines())
    assert told.exit_code == 0 and "not valid text" in first["error"]["message"]
    assert "context is 8192" in second["error"]["message"]
    assert answer["finish_reason"] == "length"
    for message in ("not valid text", "no command /rest", "context is 8192"):
        assert message in told.stderr


def test_input_that_is_no_text_ends_the_command(llm, monkeypatch):
    monkeypatch.setattr("graft.cli.generate.run.load_llm", lambda *args, **options: llm)
    refused = graft_command("run", "--max-tokens", "4", stdin=b"caf\xe9\n")
    assert refused.exit_code == 2 and "not valid text" in refused.stderr


def test_one_wrong_prompt_among_others_is_told_and_the_exit_code_is_1(llm, monkeypatch):
    monkeypatch.setattr("graft.cli.generate.run.load_llm", lambda *args, **options: llm)
    args = ("run", "Hello", "", "--max-tokens", "3")
    told = graft_command(*args, "--json")
    assert told.exit_code == 1
    first, second = json.loads(told.stdout)["outputs"]
    assert first["error"] is None and "no tokens" in second["error"] and second["finish_reason"] == "error"
    plain = graft_command(*args)
    assert plain.exit_code == 1 and "no tokens" in plain.stderr and "Hello" in plain.stdout


def test_a_template_that_refuses_says_so(llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UsageError, match="refuses the conversation: roles must alternate"):
        llm.chat([{"role": "user", "content": "hi"}])
    with pytest.raises(UsageError, match="a message is"):
        llm.chat(["hi"])
