"""An engine process without a model, which does as its prompts say: for tests of everything round the engine.

An answer counts on from the last token of its prompt. By its first token a prompt asks for more: with HANG it is
never begun, with PAUSE it has one token and no other, with DIE it ends the process, with SLOW it has a token every
20 ms. A model of the name `refused` cannot be loaded, `other-tokens` says of its tokenizer what is not so, and `chat`
has a chat template. A `parrot` says what stands behind `say:` in its prompt, and has a template with tools; a
`thinker` is one whose template has the marks of thoughts, too. With --runner pooling it gives vectors: the length of
a prompt, its last token, 1 and 0; those of a model `matryoshka` may be cut to 2 numbers. The first
request of a model of the name `first-fails` ends in an error, that of `first-dies` ends the process.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from dataclasses import asdict

from tokenizers import Tokenizer

from graft.serve.wire import AnswerRow, EngineLoad, ServedModel, TokenLogprobs, as_base64, frame, messages
from serve_cases import TEMPLATE, THINK_TEMPLATE, TOOL_TEMPLATE, tokenizer_json

DIE, HANG, SLOW, PAUSE = 3, 4, 5, 6
CONTEXT, VOCABULARY = 64, 300
TOKENIZER = Tokenizer.from_str(tokenizer_json())
END = 2  # <|im_end|>
QUEUED = 0.25  # seconds that every request says it has waited
# a cache with four blocks of two conversations, of which one is over
EVENTS = [
    {"type": "created", "event_id": 0, "time": 0, "levels": [100], "block_size": 4, "root": "00"},
    {"type": "stored", "event_id": 1, "time": 0, "parent": None, "blocks": [
        {"hash": name, "tokens": [7, 7, 7, 7]} for name in ("a1", "a2", "a3")]},
    {"type": "stored", "event_id": 2, "time": 0, "parent": "a1", "blocks": [{"hash": "b1", "tokens": [8, 8, 8, 8]}]},
    {"type": "updated", "event_id": 3, "time": 0, "hashes": ["b1"], "what": "in_use", "old": True, "new": False},
]  # fmt: skip


class Stub:
    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.lock, self.steps = connection, threading.Lock(), 0
        self.open: dict[int, dict] = {}

    def send(self, **message) -> None:
        self.connection.sendall(frame(message))

    def read(self) -> None:
        asked = messages(self.connection)
        options = next(asked)["load"]
        if options["model"] == "refused":
            self.send(failed="no such model; known: none", exit=2)
            os._exit(0)
        self.parrot = options["model"] in ("parrot", "thinker")
        templates = {"chat": TEMPLATE, "parrot": TOOL_TEMPLATE, "thinker": THINK_TEMPLATE}
        served = ServedModel(
            "stub", 2000 if self.parrot else CONTEXT, VOCABULARY, 2000 if self.parrot else 1000,
            options["engine"]["max_num_seqs"] or 256, tokenizer_json(), templates.get(options["model"]), {},
            [("hi", [1], "hi")] if options["model"] == "other-tokens" else (), [2],
            "pooling" if options["engine"]["runner"] == "pooling" else "generate",
            [2] if options["model"] == "matryoshka" else (), 4,
        )  # fmt: skip
        self.embeds = served.runner == "pooling"
        self.send(progress="stubbing")
        self.send(ready=asdict(served))
        threading.Thread(target=self.step_forever, daemon=True).start()
        for message in asked:
            if options["model"] == "first-dies":
                os._exit(9)
            if options["model"] == "first-fails" and "submit" in message:
                number = message["submit"][0]["id"]
                self.send(rows=[AnswerRow(number, 0, [], None, "error", None, 0, "no kernel")], load={})
                continue
            if number := message.get("follow_events"):
                self.send(events=EVENTS, of=number)
            with self.lock:
                self.open |= {
                    one["id"]: {**one, "params": message["params"][one["params"]], "sent": 0}
                    for one in message.get("submit", ())
                }
                for number in message.get("abort", ()):
                    self.open.pop(number, None)
                late = [n for n in message.get("expire", ()) if n in self.open and self.open[n]["prompt"][0] == HANG]
            for number in late:
                self.send(rows=[AnswerRow(number, 0, [], None, "abort", None, 0, None)])
        os._exit(0)

    def step_forever(self) -> None:
        told = None
        while True:
            with self.lock:
                rows = [row for number in list(self.open) for row in self.rows(number)]
                self.steps += bool(rows)
                load = EngineLoad(running=len(self.open), blocks=100, used_blocks=len(self.open), steps=self.steps)
            if rows or load != told:
                self.send(rows=rows, load=load.to_json())
            told = load
            time.sleep(0.002)

    def rows(self, number: int) -> list[AnswerRow]:
        one = self.open[number]
        prompt, params, sent = one["prompt"], one["params"], one["sent"]
        if self.parrot and len(prompt) > 1:
            return self.said(number, one)
        if prompt[0] == DIE:
            os._exit(9)
        if self.embeds and prompt[0] != HANG:
            del self.open[number]
            vector = as_base64([float(len(prompt)), float(prompt[-1]), 1.0, 0.0])
            return [AnswerRow(number, 0, [], None, "stop", None, 0, None, embedding=vector)]
        if (
            prompt[0] == HANG
            or (prompt[0] == PAUSE and sent)
            or (prompt[0] == SLOW and time.monotonic() < one.get("next", 0))
        ):
            return []
        one["sent"], one["next"] = sent + 1, time.monotonic() + 0.02
        token = (prompt[-1] + 1 + sent) % VOCABULARY
        reason = "length" if sent + 1 == params["max_tokens"] else None
        if reason is not None:
            del self.open[number]
        top = params["logprobs"]
        likely = None if top is None else [TokenLogprobs(-0.5, [(token, -0.5), (7, float("-1e30"))][:top])]
        scores = params["prompt_logprobs"] if not sent else None
        told = None if scores is None else [TokenLogprobs(-p / 8, [(7, -0.25)][:scores], 2) for p in prompt[1:]]
        return [
            AnswerRow(number, sample, [token], likely, reason, None, 0, None, None if sample else told, QUEUED)
            for sample in range(params["n"])
        ]

    def said(self, number: int, one: dict) -> list[AnswerRow]:
        if "words" not in one:
            text = TOKENIZER.decode(one["prompt"], skip_special_tokens=False)
            one["words"] = [*TOKENIZER.encode(text.partition("say:")[2].partition("<|im_end|>")[0]).ids, END]
        token = one["words"][one["sent"]]
        one["sent"] += 1
        reason = "stop" if token == END else "length" if one["sent"] == one["params"]["max_tokens"] else None
        if reason is not None:
            del self.open[number]
        ended = token if token == END else None
        top, score = one["params"]["logprobs"], -one["sent"] / 8
        likely = None if top is None else [TokenLogprobs(score, [(token, score), (7, -9.0)][:top])]
        return [
            AnswerRow(number, sample, [token], likely, reason, ended, 0, None) for sample in range(one["params"]["n"])
        ]


if __name__ == "__main__":
    Stub(socket.socket(fileno=int(sys.argv[1]))).read()
