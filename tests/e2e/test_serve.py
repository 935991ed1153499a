"""A real server over a real engine: what clients get is what LLM.generate gives."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

import graft
from graft.engine.kv.events import Created, Stored, from_json
from graft.engine.kv.view import CacheView
from serve_cases import PATIENCE, http_client, poll, sent, serving, tiny_checkpoint
from serve_soak import Soak

USER = [{"role": "user", "content": "the quick brown fox"}]
PROMPTS = ["the quick brown", "Hello, 你好 🙂 ", "naïve café and the lazy dog jumps over"]


USED = 'vllm:kv_cache_usage_perc{model_name="tiny-served"}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("served") / "tiny-served")


@pytest.fixture(scope="module")
def server(folder, llm):  # the model is captured once
    """Asked to end while it answers, it answers, and ends well."""
    size = ("--dtype", "float32", "--backend", "eager", "--max-num-seqs", 8, "--kv-cache-memory", "4MiB")
    with serving(folder, *size, "--enable-kv-cache-events", stub=False, OMP_NUM_THREADS="1") as found:
        yield found
        with http_client(found.url) as plain, plain.stream("POST", "/v1/completions", json=long(64)) as answer:
            found.signal()
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]" and json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert found.ended() == 0


@pytest.fixture(scope="module")
def llm(folder):
    return graft.LLM(folder, dtype="float32", device="cpu", backend="eager", max_num_seqs=8, kv_cache_memory="4MiB")


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE) as found:
        yield found


@pytest.fixture(scope="module")
def plain(server):
    with http_client(server.url) as found:
        yield found


def long(tokens, **more):
    return {"prompt": [9, 8, 7], "max_tokens": tokens, "ignore_eos": True, "stream": True, **more}


def strict(answer):
    """openai's types are never checked unless one asks for it."""
    type(answer).model_validate(answer.model_dump(), strict=True)
    return answer


CASES = [
    {"temperature": 0, "max_tokens": 24},
    {"temperature": 0.9, "seed": 5, "max_tokens": 20, "top_p": 0.9, "n": 3},
    {"temperature": 1.5, "seed": 6, "max_tokens": 30, "top_k": 20, "min_p": 0.01, "ignore_eos": True},
    {"temperature": 0, "max_tokens": 40, "repetition_penalty": 1.3, "presence_penalty": 0.5, "logprobs": 3},
    {"temperature": 0.7, "seed": 1, "max_tokens": 40, "stop": ["e", "q"], "frequency_penalty": 0.2},
    {"temperature": 0.7, "seed": 2, "max_tokens": 40, "stop": ["a"], "include_stop_str_in_output": True},
    {"temperature": 0, "max_tokens": 20, "logit_bias": {"70": 100, "5": -100}, "ignore_eos": True},
    {"temperature": 0, "max_tokens": 12, "stop_token_ids": list(range(40, 160)), "min_tokens": 3},
    {"temperature": 0.9, "seed": 4, "max_tokens": 20, "allowed_token_ids": [2, 40, 41, 42, 60, 280], "n": 2},
    {"temperature": 1.2, "seed": 9, "max_tokens": 40, "bad_words": ["the", "a", "é", " q"], "logprobs": 1},
]


def choices_of(output):
    return [output, *output.alternatives]


def streamed(plain, body):
    """The choices of a stream put together: text, tokens, logprobs and the one finish reason of each."""
    found = {}
    with plain.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for one in json.loads(line[6:])["choices"]:
                    text, ids, ends = found.setdefault(one["index"], ([], [], []))
                    text.append(one["text"])
                    ids += one["token_ids"]
                    ends += [one["finish_reason"]] if one["finish_reason"] else []
    return {index: ("".join(text), ids, ends) for index, (text, ids, ends) in found.items()}


def test_prompts_are_as_likely_as_in_process(llm, client):
    """As lm-eval asks. The null of the first token is OpenAI's own, though not in its types."""
    asked = {"echo": True, "logprobs": 2, "max_tokens": 0}
    answer = client.completions.create(model="tiny-served", prompt=PROMPTS, **asked)
    expected = llm.generate(PROMPTS, graft.SamplingParams(max_tokens=1, prompt_logprobs=2))
    for one, choice in zip(expected, answer.choices, strict=True):
        ids, scores = one.prompt_token_ids, one.prompt_logprobs
        assert choice.logprobs.token_logprobs[0] is None and len(choice.logprobs.tokens) == len(ids)
        own = [each[token].logprob for token, each in zip(ids[1:], scores[1:], strict=True)]
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(own, abs=1e-4)
        assert choice.text == PROMPTS[choice.index]


def test_all_at_once_whole_and_streamed_are_the_tokens_of_generate(llm, plain):
    """24 requests share batches; each has the tokens and the text that it has alone."""
    bodies = [{"prompt": prompt, "return_token_ids": True, **case} for prompt in PROMPTS for case in CASES]
    with ThreadPoolExecutor(16) as pool:
        wholes = pool.map(lambda body: plain.post("/v1/completions", json=body), bodies)
        streams = pool.map(lambda body: streamed(plain, body), bodies)
        wholes, streams = list(wholes), list(streams)
    for body, whole, stream in zip(bodies, wholes, streams, strict=True):
        params = {name: value for name, value in body.items() if name not in ("prompt", "return_token_ids")}
        if bias := params.get("logit_bias"):
            params["logit_bias"] = {int(token): value for token, value in bias.items()}
        (expected,) = llm.generate([body["prompt"]], graft.SamplingParams(**params))
        answer = whole.json()
        assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
        for index, one in enumerate(choices_of(expected)):
            found = answer["choices"][index]
            assert found["token_ids"] == one.token_ids and found["text"] == one.text, body
            assert (found["finish_reason"], found["stop_reason"]) == (one.finish_reason, one.stop_reason)
            assert stream[index] == (one.text, one.token_ids, [one.finish_reason]), body
            if one.logprobs is not None:
                given = [each[token].logprob for each, token in zip(one.logprobs, one.token_ids, strict=True)]
                assert found["logprobs"]["token_logprobs"] == pytest.approx(given, abs=1e-4)
                assert all(len(top) <= 3 for top in found["logprobs"]["top_logprobs"])


def test_messages_have_the_tokens_of_generate(plain, llm):
    """Anthropic's API: the same prompt, what the assistant began included, and stop strings by name."""
    began = [*USER, {"role": "assistant", "content": "jumps"}]
    body = {"messages": began, "temperature": 0, "max_tokens": 20}
    prompt = [*llm.chat_prompt(USER), *llm.tokenizer.encode("jumps", add_special_tokens=False)]
    (expected,) = llm.generate([prompt], graft.SamplingParams(max_tokens=20))
    answer = plain.post("/v1/messages", json=body).json()
    assert answer["content"] == [{"type": "text", "text": expected.text}]
    counted = plain.post("/v1/messages/count_tokens", json={"messages": began}).json()["input_tokens"]
    usage = answer["usage"]
    assert counted == len(prompt) == usage["input_tokens"] + usage["cache_read_input_tokens"]
    asked = {"messages": began, "continue_final_message": True, "temperature": 0, "max_tokens": 20}
    (choice,) = plain.post("/v1/chat/completions", json=asked).json()["choices"]
    assert choice["message"]["content"] == expected.text
    assert plain.post("/tokenize", json=asked).json()["tokens"] == prompt
    stop = expected.text[4]
    stopped = plain.post("/v1/messages", json={**body, "stop_sequences": ["never", stop]}).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", stop)
    assert stopped["content"][0]["text"] == expected.text.partition(stop)[0]
    lines = plain.post("/v1/messages", json={**body, "stream": True}).text.splitlines()
    told = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    deltas = [one["delta"] for one in told if one["type"] == "content_block_delta"]
    assert "".join(one["text"] for one in deltas) == expected.text and len(deltas) > 1
    assert told[-2]["usage"]["output_tokens"] == len(expected.token_ids)


def test_chat_by_openais_client(client, llm):
    (expected,) = llm.generate([llm.chat_prompt(USER)], graft.SamplingParams(max_tokens=20))
    asked = {"model": "tiny-served", "messages": USER, "temperature": 0, "max_completion_tokens": 20}
    answer = strict(client.chat.completions.create(**asked, logprobs=True, top_logprobs=2))
    assert answer.choices[0].message.content == expected.text and answer.choices[0].message.role == "assistant"
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens == len(expected.token_ids)
    assert all(len(one.top_logprobs) == 2 for one in answer.choices[0].logprobs.content)
    options = {"include_usage": True}
    chunks = [strict(one) for one in client.chat.completions.create(**asked, stream=True, stream_options=options)]
    assert (
        chunks[0].choices[0].delta.role == "assistant" and chunks[-1].usage.total_tokens == answer.usage.total_tokens
    )
    assert "".join(one.choices[0].delta.content or "" for one in chunks[:-1]) == expected.text
    parts = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    plain = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    (expected,) = llm.generate([llm.chat_prompt(plain)], graft.SamplingParams(max_tokens=4))
    answer = client.chat.completions.create(model="tiny-served", messages=parts, temperature=0, max_tokens=4)
    assert answer.choices[0].message.content == expected.text


def test_completions_models_and_errors_by_openais_client(client, llm):
    (expected,) = llm.generate(["one two"], graft.SamplingParams(max_tokens=16))
    asked = {"model": "tiny-served", "prompt": "one two", "temperature": 0}
    answer = strict(client.completions.create(**asked, logprobs=1, extra_body={"top_k": 5}))
    assert answer.choices[0].text == expected.text  # 16 tokens, if none are asked for
    assert "".join(one.choices[0].text for one in client.completions.create(**asked, stream=True)) == expected.text
    assert [model.id for model in client.models.list()] == ["tiny-served"]
    assert strict(client.models.retrieve("tiny-served")).id == "tiny-served"
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature") as refused:
        client.completions.create(model="tiny-served", prompt="x", temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="older form of tools"):
        function = {"name": "f", "parameters": {}}
        client.chat.completions.create(model="tiny-served", messages=USER, functions=[function])


def test_responses_by_openais_client(client, llm):
    told = [{"role": "system", "content": "be brief"}, *USER]
    (expected,) = llm.generate([llm.chat_prompt(told)], graft.SamplingParams(max_tokens=20))
    asked = {"model": "tiny-served", "input": USER, "instructions": "be brief"}
    asked |= {"temperature": 0, "max_output_tokens": 20}
    answer = strict(client.responses.create(**asked))
    assert answer.output_text == expected.text and answer.usage.output_tokens == len(expected.token_ids)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    events = [strict(event) for event in client.responses.create(**asked, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected.text
    kinds = [event.type.removeprefix("response.") for event in events if not event.type.endswith(".delta")]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.done", "content_part.done",
        "output_item.done", "incomplete",
    ]  # fmt: skip
    assert events[-1].response.output_text == expected.text
    stopped = {"stop_token_ids": list(range(40, 300)), "include_stop_str_in_output": True}
    with client.responses.stream(**asked, extra_body=stopped) as stream:  # the helper that puts the events together
        found = stream.get_final_response()
    assert found.status == "completed" and expected.text.startswith(found.output_text)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model="tiny-served", input="hi", previous_response_id="resp_1")


PET = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "kind": {"$ref": "#/$defs/Kind"}},
    "required": ["name", "kind"],
    "additionalProperties": False,
    "$defs": {"Kind": {"enum": ["cat", "dog"]}},
}
BUY = {"type": "function", "function": {"name": "buy", "strict": True, "parameters": PET}}
WAIT = {
    "type": "function",
    "function": {"name": "wait", "parameters": {"type": "object", "additionalProperties": False}},
}


def is_pet(value):
    return set(value) == {"name", "kind"} and len(value["name"]) <= 5 and value["kind"] in ("cat", "dog")


def test_answers_keep_to_a_schema_and_calls_are_made(client, plain):
    """A model of random weights, hot: what is right is so by the grammar alone."""
    pytest.importorskip("llguidance")
    asked = {"model": "tiny-served", "messages": USER, "temperature": 1.2, "seed": 3, "max_tokens": 120}
    form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": PET, "strict": True}}
    whole = strict(client.chat.completions.create(**asked, n=3, response_format=form))
    assert all(is_pet(json.loads(choice.message.content)) for choice in whole.choices)
    assert all(choice.finish_reason == "stop" for choice in whole.choices)
    pieces = client.chat.completions.create(**asked, response_format=form, stream=True)
    assert is_pet(json.loads("".join(piece.choices[0].delta.content or "" for piece in pieces)))
    made = client.responses.create(
        model="tiny-served",
        input="hi",
        max_output_tokens=120,
        text={"format": {**form["json_schema"], "type": "json_schema"}},
    )
    assert is_pet(json.loads(made.output_text))
    anything = client.chat.completions.create(**asked, response_format={"type": "json_object"})
    assert anything.choices[0].message.content.startswith("{")
    asked |= {"tools": [WAIT, BUY], "parallel_tool_calls": False}  # one call: several may go on until max_tokens
    for choice in ("required", {"type": "function", "function": {"name": "buy"}}):
        whole = strict(client.chat.completions.create(**asked, tool_choice=choice))
        with client.chat.completions.stream(**asked, tool_choice=choice) as stream:
            final = stream.get_final_completion()
        for answer in (whole, final):
            (call,) = answer.choices[0].message.tool_calls
            assert answer.choices[0].finish_reason == "tool_calls" and not answer.choices[0].message.content
            name, told = call.function.name, json.loads(call.function.arguments)
            assert (name == "wait" and told == {} and choice == "required") or (name == "buy" and is_pet(told))
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
        bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}}}
        client.chat.completions.create(**asked, tool_choice="none", response_format=bad)
    assert refused.value.code == "unsupported_schema"
    assert plain.post("/v1/completions", json=long(4, response_format=form)).json()["error"]["param"] == "ignore_eos"


EXAMPLES = Path(__file__).parents[2] / "docs" / "serve.md"


def node_has_openai():
    return (
        shutil.which("node")
        and not subprocess.run(["node", "-e", "require('openai')"], capture_output=True).returncode
    )


@pytest.mark.parametrize(
    "language",
    ["sh", 'sh title="Anthropic"', 'sh title="Tokens in, tokens out"', "python", 'python title="LangChain"', "js"],
)
def test_the_examples_of_the_documentation_run(server, capsys, language):
    if "LangChain" in language:
        pytest.importorskip("langchain_openai")
    if language == "js" and not node_has_openai():
        pytest.skip("no Node here with openai in it: npm install openai, and NODE_PATH")
    found = re.findall(rf"```{re.escape(language)}\n(.*?)```", EXAMPLES.read_text(), re.S)
    blocks = [block for block in found if "/v1/embeddings" not in block]  # test_serve_embeddings.py
    assert blocks
    for block in blocks:
        text = block.replace("http://127.0.0.1:8000", server.url).replace("smollm2-135m", "tiny-served")
        if language == "js":
            done = subprocess.run(["node", "-e", text], capture_output=True, text=True, check=True)
            assert done.stdout.strip()
        elif language.startswith("python"):
            exec(compile(text, "docs/serve.md", "exec"), {})
            assert capsys.readouterr().out.strip()
        elif shutil.which("curl"):
            done = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=True)
            expected = '"content":[{"type":"text"' if "Anthropic" in language else '"choices":[{"index":0'
            assert expected in done.stdout, done.stdout


def events_of(lines, until):
    """The cache's events, up to the first for which `until` holds."""
    for line in lines:
        if line.startswith("data: "):
            event = from_json(json.loads(line[6:]))
            yield event
            if until(event):
                return


def test_readers_follow_the_cache(plain, client):
    """One who comes later has the same state; both see what happens then."""
    prompt = [random.Random(5).randrange(3, 250) for _ in range(64)]

    def stored(event):
        return isinstance(event, Stored) and any(tuple(prompt[:16]) == block.tokens[:16] for block in event.blocks)

    with plain.stream("GET", "/v1/kv_cache_events") as one, plain.stream("GET", "/v1/kv_cache_events") as other:
        assert one.headers["content-type"].startswith("text/event-stream")
        client.completions.create(model="tiny-served", prompt=prompt, max_tokens=2)
        for stream in (one, other):
            first, view = list(events_of(stream.iter_lines(), stored)), CacheView()
            assert isinstance(first[0], Created)
            for event in first:
                view.apply(event)  # in order, without gaps
            assert {block.hash for block in first[-1].blocks} <= set(view.blocks)


def test_tokens_are_those_of_the_engine(llm, plain):
    for text in (*PROMPTS, "", "<|im_start|>user\n \u00e9\u0301 \ufffd"):
        found = plain.post("/tokenize", json={"prompt": text}).json()
        assert found["tokens"] == llm.encode(text)
    found = plain.post("/tokenize", json={"messages": USER}).json()
    assert found["tokens"] == llm.chat_prompt(USER)


def test_a_short_soak(llm, server):
    """Whatever clients do, the others have the right tokens; the long one is in test_serve_soak.py."""
    rng = random.Random(0)
    params = [{"max_tokens": rng.randint(1, 60), "temperature": 0.8, "seed": n, "ignore_eos": True} for n in range(8)]
    prompts = [[rng.randrange(3, 300) for _ in range(rng.randint(1, 100))] for _ in params]
    outputs = llm.generate(prompts, [graft.SamplingParams(**one) for one in params])
    bodies = [{"prompt": p, "return_token_ids": True, **more} for p, more in zip(prompts, params, strict=True)]
    host, port = server.url.removeprefix("http://").split(":")
    expected = [(body, output.token_ids) for body, output in zip(bodies, outputs, strict=True)]
    soak = Soak(host, int(port), expected, rng)
    asyncio.run(soak.run(80, 24))
    assert not soak.wrong, soak.wrong[:3]
    assert soak.seen["whole: 200"] and soak.seen["streamed: 200"] and not [k for k in soak.seen if ": 50" in k], soak


@pytest.mark.some(1)
@pytest.mark.parametrize("stream", [True, False])
def test_who_goes_away_gives_back_its_blocks(plain, server, stream):
    """A socket that is closed, in the middle of an answer."""

    def usage():
        return float(plain.get("/metrics").text.split(USED)[1].split()[0])

    with sent(server.url, long(500, stream=stream)):
        poll(lambda: usage() > 0)
    poll(lambda: usage() == 0)
    text = plain.get("/metrics").text
    assert 'finished_reason="abort"' in text
