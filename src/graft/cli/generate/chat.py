"""`graft chat`: a conversation in the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from graft.cli.documents import error_document, print_json
from graft.cli.load import load_llm, sampling_params
from graft.cli.options import (
    DEFAULT_MODEL,
    Backend,
    CacheDtype,
    CacheMemory,
    ConfigFile,
    Device,
    DType,
    Frequency,
    MaxModelLen,
    MinP,
    Model,
    Presence,
    Quantize,
    Recompile,
    Repetition,
    Seed,
    Sets,
    Stop,
    Temperature,
    TensorParallel,
    TopK,
    TopP,
    TrustRemoteCode,
    UseCache,
)

if TYPE_CHECKING:
    from graft.engine.llm import LLM
    from graft.engine.params import SamplingParams

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer"
Messages = list[dict[str, str]]


def chat(
    model: Model = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    max_tokens: Annotated[int, typer.Option(help="New tokens of an answer.")] = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    presence_penalty: Presence = 0.0,
    frequency_penalty: Frequency = 0.0,
    repetition_penalty: Repetition = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    dtype: DType = "auto",
    device: Device = "auto",
    backend: Backend = "auto",
    config: ConfigFile = None,
    sets: Sets = None,
    quantize: Quantize = None,
    kv_cache_memory: CacheMemory = None,
    kv_cache_dtype: CacheDtype = "auto",
    max_model_len: MaxModelLen = None,
    tensor_parallel: TensorParallel = None,
    trust_remote_code: TrustRemoteCode = False,
    use_cache: UseCache = True,
    recompile: Recompile = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line for each answer, and nothing else.")] = False,
) -> None:
    """Talk with a model. Lines from a pipe are answered one after another."""
    from graft.cli.show import err, progress_bar

    params = sampling_params(
        stop, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed,
        presence_penalty=presence_penalty, frequency_penalty=frequency_penalty, repetition_penalty=repetition_penalty,
    )  # fmt: skip
    with progress_bar() as progress:
        llm = load_llm(
            model, progress, dtype=dtype, device=device, config=config, sets=sets, quantize=quantize, backend=backend,
            kv_cache_memory=kv_cache_memory, kv_cache_dtype=kv_cache_dtype, max_model_len=max_model_len,
            trust_remote_code=trust_remote_code, use_cache=use_cache, recompile=recompile,
            tensor_parallel_size=tensor_parallel,
        )  # fmt: skip
    start: Messages = [{"role": "system", "content": system}] if system else []
    llm.chat_prompt([*start, {"role": "user", "content": "hi"}])  # a model that cannot chat says so now
    if sys.stdin.isatty():
        err.print(f"{llm.model.name}: {HELP}", markup=False)
    converse(llm, params, start, as_json)


def converse(llm: LLM, params: SamplingParams, start: Messages, as_json: bool) -> None:
    """A line that cannot be answered is told and forgotten; the conversation goes on."""
    from graft.base.errors import GraftError
    from graft.engine.prompts import as_text

    messages = list(start)
    for line in lines(as_json):
        try:
            text = as_text(line).strip()
            if text == "/exit":
                return
            if text == "/reset":
                messages = list(start)
            elif text.startswith("/"):
                print(f"graft: there is no command {text.split()[0]}; {HELP}", file=sys.stderr)
            elif text:
                asked = [*messages, {"role": "user", "content": text}]
                messages = [*asked, {"role": "assistant", "content": reply(llm, asked, params, as_json)}]
        except GraftError as error:
            print(f"graft: error: {error}", file=sys.stderr)
            if as_json:
                print(json.dumps(error_document(error, str(error), error.exit_code)), flush=True)


def lines(as_json: bool) -> Iterator[bytes]:
    """What the user says, until the end of the input or Ctrl-C at the prompt."""
    from graft.base.files import cache_dir
    from graft.cli.generate.line_editing import can_edit, edited_lines, history

    if not as_json and can_edit():
        with history(cache_dir() / "chat_history"):
            yield from edited_lines("> ")
        return
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.buffer.readline()
        except KeyboardInterrupt:
            print(file=sys.stderr)
            return
        if not line:
            return
        yield line


def reply(llm: LLM, messages: Messages, params: SamplingParams, as_json: bool) -> str:
    """Prints the answer as it comes. Ctrl-C ends the answer, not the conversation."""
    pieces: list[str] = []
    prompt = llm.chat_prompt(messages)
    room = llm.model.context - len(prompt)  # an answer may be cut short; a prompt without room for one is refused
    request = llm.submit(prompt, replace(params, max_tokens=max(1, min(params.max_tokens, room))))
    try:
        for piece in llm.follow(request):
            pieces.append(piece)
            if not as_json:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="", file=sys.stderr)
    answer = "".join(pieces)
    s = llm.stats
    if as_json:
        counts = {"prompt_tokens": s.prompt_tokens, "cached_tokens": s.cached_tokens, "new_tokens": s.new_tokens}
        print_json("chat", {"answer": answer, "finish_reason": request.finish_reason, **counts}, flush=True)
    else:
        print(flush=True)
    if request.finish_reason == "length" and not as_json:
        print("[cut short: --max-tokens, or the end of the model's context]", file=sys.stderr)
    if sys.stderr.isatty() and not as_json:
        told = f"{s.prompt_tokens} prompt tokens ({s.cached_tokens} from the cache), {s.new_tokens} new"
        print(f"[{told}, {s.decode_rate:.1f} tokens/s]", file=sys.stderr)
    return answer
