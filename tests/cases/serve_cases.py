"""Servers in processes of their own, and the tokenizer of the models that they serve."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

STUBBED = """
import sys
from graft.models import names
from graft.serve import link
link.WORKER = "stub_engine"
names.check_name = lambda name: None  # its models have names of their own
from graft.__main__ import main
main()
"""
CORPUS = (
    "the quick brown fox jumps over the lazy dog",
    "Hello, world! naïve café 你好 🙂",
    "one two three, four five",
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL_TEMPLATE = "{% if tools %}Use <tool_call>: {{ tools | tojson }}{% endif %}" + TEMPLATE
THINK_TEMPLATE = TOOL_TEMPLATE + "{% if enable_thinking is true %}<think>\n{% endif %}{# </think> #}"
PATIENCE = 120.0  # seconds: a bound for a busy machine, never waited for otherwise


@cache
def tokenizer_json() -> str:
    """Bytes, and a few pairs of them; three special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    return made.to_str()


def tiny_checkpoint(folder: Path) -> Path:
    """A tiny Llama with random weights and a tokenizer that knows bytes."""
    import torch
    from tokenizers import Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=1, eos_token_id=2, initializer_range=0.4,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer_json()), eos_token="<|im_end|>", chat_template=TOOL_TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    return folder


def poll(found: Callable[[], Any], patience: float = PATIENCE) -> Any:
    """What `found` gives once that is true; it is asked again and again, long enough for any machine."""
    end = time.monotonic() + patience
    while not (result := found()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)
    return result


class Served:
    """A server's process."""

    patience = PATIENCE  # until it is ready

    def __init__(self, *arguments: Any, stub: bool = True, errors: Any = None, **environment: str) -> None:
        from processes import Forked  # the engines of tests, which import this file, start no process

        start = ["-c", STUBBED] if stub else ["-m", "graft"]
        paths = os.pathsep.join([str(Path(__file__).parent), str(source()), os.environ.get("PYTHONPATH", "")])
        self.process = Forked(
            *start, "serve", *arguments, "--port", "0",
            stdout=subprocess.PIPE, stderr=errors, env={**os.environ, "PYTHONPATH": paths, **environment},
        )  # fmt: skip

    @property
    def url(self) -> str:
        """Waits until it is ready."""
        if not hasattr(self, "found"):
            assert self.process.stdout is not None
            assert select.select([self.process.stdout], [], [], self.patience)[0], "it never got ready"
            line = self.process.stdout.readline()
            assert "ready at" in line, f"not ready: {line!r}, exit status {self.process.poll()}"
            self.found = line.split("ready at ")[1].split("/v1")[0]
        return self.found

    @property
    def engine(self) -> int:
        """The number of the engine's process."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return int(children.split()[0])

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def ended(self) -> int:
        return self.process.wait(PATIENCE)


def http_client(url: str, **options: Any) -> Any:
    """One for many requests; certificates, which take a tenth of a second to load, are of no use here."""
    import httpx

    limits = httpx.Limits(max_connections=64, max_keepalive_connections=64)
    return httpx.Client(base_url=url, timeout=PATIENCE, verify=False, limits=limits, **options)


@contextmanager
def sent(url: str, body: dict[str, Any], key: str = "", path: str = "/v1/completions") -> Iterator[None]:
    """A request by a client that leaves at the end of the block without reading."""
    host, port = url.removeprefix("http://").split(":")
    text = json.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n"
    head += f"Authorization: Bearer {key}\r\n\r\n" if key else "\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall((head + text).encode())
        yield


def complete(client: Any, prompt: Any, **more: Any) -> Any:
    return client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4, **more})


def stream_of(client: Any, prompt: Any, **more: Any) -> Any:
    body = {"prompt": prompt, "stream": True, "max_tokens": 30, **more}
    return client.stream("POST", "/v1/completions", json=body)


def chunks(lines: Iterable[str]) -> tuple[list[Any], bool]:
    """The events of a stream, without the end mark, and whether that was there."""
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(one) for one in data if one != "[DONE]"], data[-1:] == ["[DONE]"]


def running(client: Any) -> int:
    return client.get("/health").json()["running"]


def source() -> Path:
    import graft

    return Path(graft.__file__).parents[1]


@contextmanager
def serving(*arguments: Any, **options: Any) -> Iterator[Served]:
    server = Served(*arguments, **options)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
        if server.process.stdout is not None:
            server.process.stdout.close()
