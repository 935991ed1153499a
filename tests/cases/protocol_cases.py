"""Bodies of requests, read as the server reads them; what is wrong in them, as an error."""

from __future__ import annotations

import pytest

from graft.base.errors import HttpRefused
from graft.serve.protocol import requests, responses
from graft.serve.text import ServedText
from graft.serve.wire import ServedModel
from serve_cases import TEMPLATE, tokenizer_json

NAMES = ("mine", "other")
TEXT = ServedText(ServedModel("mine", 64, 300, 1000, 4, tokenizer_json(), TEMPLATE, {"eos_token": "<|im_end|>"}, ()))
MESSAGES = [{"role": "user", "content": "hi"}]


def completion(**body):
    return requests.completion({"prompt": "hi", **body}, NAMES, 300)


def chat(**body):
    return requests.chat({"messages": MESSAGES, **body}, NAMES)


def respond(**body):
    return responses.response({"input": "hi", **body}, NAMES)


def refused(call):
    with pytest.raises(HttpRefused) as found:
        call()
    return found.value
