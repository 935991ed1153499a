"""/openapi.json: what the endpoints take and give, for tools that make clients, documentation or tests of it.

Bodies are described as far as they are ours to describe: unknown fields are ignored, so objects are open.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from graft import __version__
from graft.engine.params import MOST_LOGPROBS
from graft.serve.protocol.errors import of_messages
from graft.serve.protocol.responses import INCLUDED
from graft.serve.protocol.sampling import MOST_SAMPLES
from graft.serve.protocol.scheduling import MOST as MOST_PRIORITY
from graft.serve.protocol.token_requests import PATH as TOKENS
from graft.serve.protocol.tools import MOST_TOOLS

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
FLAG: Schema = {"type": ["boolean", "null"]}
OBJECT: Schema = {"type": "object"}
IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
ROLES = ["system", "developer", "user", "assistant", "tool"]


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def number(least: float, most: float) -> Schema:
    return {"type": ["number", "null"], "minimum": least, "maximum": most}


def whole(least: int, most: int | None = None) -> Schema:
    return {"type": ["integer", "null"], "minimum": least, **({} if most is None else {"maximum": most})}


def listed(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def entity(required: dict[str, Schema], **optional: Schema) -> Schema:
    return {"type": "object", "required": list(required), "properties": {**required, **optional}}


SAMPLING: dict[str, Schema] = {
    "model": ref("ModelName"),
    "stream": FLAG,
    "temperature": {"type": ["number", "null"], "minimum": 0},
    "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": ["integer", "null"], "minimum": -1},
    "min_p": number(0, 1),
    "n": whole(1, MOST_SAMPLES),
    "seed": {"type": ["integer", "null"]},
    "stop": {"anyOf": [TEXT, listed(TEXT), {"type": "null"}]},
    "stop_token_ids": {"anyOf": [IDS, {"type": "null"}]},
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": {"type": ["number", "null"], "exclusiveMinimum": 0},
    "min_tokens": whole(0),
    "ignore_eos": FLAG,
    "logit_bias": {"type": ["object", "null"], "additionalProperties": {"type": "number"}},
    "allowed_token_ids": {"anyOf": [{**IDS, "minItems": 1}, {"type": "null"}]},
    "bad_words": {"type": ["array", "null"], "items": TEXT},
    "truncate_prompt_tokens": whole(-1),
    "truncation_side": {"enum": ["left", "right", None]},
    "priority": whole(-MOST_PRIORITY, MOST_PRIORITY),
    "response_format": {"type": ["object", "null"]},
    "structured_outputs": {"type": ["object", "null"]},
    "stream_options": {"type": ["object", "null"]},
}
TOOLS = {"type": ["array", "null"], "items": OBJECT, "maxItems": MOST_TOOLS}
USAGE = entity({"prompt_tokens": WHOLE, "completion_tokens": WHOLE, "total_tokens": WHOLE})
ENDED = {"finish_reason": {"type": ["string", "null"]}}
MESSAGES = listed(
    entity({"role": {"enum": ["user", "assistant"]}, "content": {"anyOf": [TEXT, listed(OBJECT)]}}), minItems=1
)
ANTHROPIC: dict[str, Schema] = {
    "model": ref("ModelName"),
    "system": {"anyOf": [TEXT, listed(OBJECT), {"type": "null"}]},
    "tools": TOOLS,
    "tool_choice": {"type": ["object", "null"]},
    "thinking": {"type": ["object", "null"]},
}
SCHEMAS: dict[str, Schema] = {
    "MessageError": entity({"type": {"const": "error"}, "error": entity({"type": TEXT, "message": TEXT})}),
    "Error": entity(
        {
            "error": entity(
                {"message": TEXT, "type": TEXT},
                param={"type": ["string", "null"]},
                code={"type": ["string", "null"]},
            )
        }
    ),
    "Message": entity({"role": {"enum": ROLES}}, content={"anyOf": [TEXT, listed(OBJECT), {"type": "null"}]}),
    "ChatRequest": entity(
        {"messages": listed(ref("Message"), minItems=1)},
        **SAMPLING,
        max_tokens=whole(1),
        max_completion_tokens=whole(1),
        logprobs=FLAG,
        top_logprobs=whole(0, MOST_LOGPROBS),
        tools=TOOLS,
    ),
    "CompletionRequest": entity(
        {"prompt": {"anyOf": [TEXT, IDS, listed(TEXT, minItems=1), listed(IDS, minItems=1)]}},
        **SAMPLING,
        max_tokens=whole(0),
        echo=FLAG,
        logprobs=whole(0, MOST_LOGPROBS),
    ),
    "ResponseRequest": entity(
        {"input": {"anyOf": [TEXT, listed(OBJECT, minItems=1)]}},
        **SAMPLING,
        instructions={"type": ["string", "null"]},
        max_output_tokens=whole(1),
        include={"type": ["array", "null"], "items": {"enum": list(INCLUDED)}},
        top_logprobs=whole(0, MOST_LOGPROBS),
        tools=TOOLS,
    ),
    "TokensRequest": entity(
        {"token_ids": {**IDS, "minItems": 1}},
        model=ref("ModelName"),
        sampling_params={"type": ["object", "null"], "properties": {**SAMPLING, "max_tokens": whole(1)}},
        request_id={"type": ["string", "null"]},
        stream=FLAG,
        stream_options={"type": ["object", "null"]},
        return_token_ids=FLAG,
    ),
    "MessagesRequest": entity(
        {"messages": MESSAGES, "max_tokens": {"type": "integer", "minimum": 1}},
        **ANTHROPIC,
        stream=FLAG,
        temperature=SAMPLING["temperature"],
        top_p=SAMPLING["top_p"],
        top_k=SAMPLING["top_k"],
        stop_sequences={"anyOf": [listed(TEXT), {"type": "null"}]},
    ),
    "CountRequest": entity({"messages": MESSAGES}, **ANTHROPIC),
    "TokenizeRequest": {
        "anyOf": [entity({"prompt": TEXT}), entity({"messages": listed(ref("Message"), minItems=1)})],
    },
    "DetokenizeRequest": entity({"tokens": IDS}),
    "EmbeddingRequest": entity(
        {"input": {"anyOf": [TEXT, IDS, listed(TEXT, minItems=1), listed(IDS, minItems=1)]}},
        model=ref("ModelName"),
        encoding_format={"enum": ["float", "base64", None]},
        dimensions=whole(1),
        truncate_prompt_tokens=whole(-1),
        truncation_side=SAMPLING["truncation_side"],
        priority=SAMPLING["priority"],
    ),
    "Chat": entity(
        {
            "id": TEXT, "object": {"const": "chat.completion"}, "created": WHOLE, "model": TEXT, "usage": USAGE,
            "choices": listed(entity({"index": WHOLE, "message": OBJECT, **ENDED}), minItems=1),
        }
    ),
    "Completion": entity(
        {
            "id": TEXT, "object": {"const": "text_completion"}, "created": WHOLE, "model": TEXT, "usage": USAGE,
            "choices": listed(entity({"index": WHOLE, "text": TEXT, **ENDED}), minItems=1),
        }
    ),
    "TokenAnswer": entity(
        {
            "request_id": TEXT, "created": WHOLE, "model": TEXT, "usage": USAGE,
            "choices": listed(entity({"index": WHOLE, "token_ids": IDS, **ENDED}), minItems=1),
        }
    ),
    "Response": entity(
        {"id": TEXT, "object": {"const": "response"}, "status": TEXT, "output": listed(OBJECT, minItems=1)}
    ),
    "AnthropicMessage": entity(
        {
            "id": TEXT, "type": {"const": "message"}, "role": {"const": "assistant"}, "model": TEXT,
            "content": listed(OBJECT), "stop_reason": {"type": ["string", "null"]},
            "usage": entity({"input_tokens": WHOLE, "output_tokens": WHOLE}),
        }
    ),
    "Count": entity({"input_tokens": WHOLE}),
    "Embeddings": entity(
        {
            "object": {"const": "list"}, "model": TEXT,
            "usage": entity({"prompt_tokens": WHOLE, "total_tokens": WHOLE}),
            "data": listed(
                entity({"index": WHOLE, "embedding": {"anyOf": [TEXT, listed({"type": "number"})]}}), minItems=1
            ),
        }
    ),
    "Tokens": entity({"count": WHOLE, "max_model_len": WHOLE, "tokens": IDS}),
    "Prompt": entity({"prompt": TEXT}),
    "Model": entity({"id": TEXT, "object": {"const": "model"}, "created": WHOLE, "owned_by": TEXT}),
    "Models": entity({"object": {"const": "list"}, "data": listed(ref("Model"), minItems=1)}),
    "Health": entity({"status": TEXT, "seconds_since_step": {"type": "number"}, "running": WHOLE, "waiting": WHOLE}),
    "Ready": entity({"ready": {"type": "boolean"}}),
    "Version": entity({"version": TEXT}),
}  # fmt: skip


class Endpoint(NamedTuple):
    """body, answer: names of schemas. stream: it may be one of events."""

    method: str
    summary: str
    body: str | None
    answer: str | None
    stream: bool


PATHS = {
    "/v1/chat/completions": Endpoint("post", "A conversation is answered", "ChatRequest", "Chat", True),
    "/v1/completions": Endpoint("post", "A text is continued", "CompletionRequest", "Completion", True),
    "/v1/responses": Endpoint("post", "A conversation is answered by items", "ResponseRequest", "Response", True),
    TOKENS: Endpoint("post", "Token ids are continued", "TokensRequest", "TokenAnswer", True),
    "/v1/messages": Endpoint("post", "As Anthropic's", "MessagesRequest", "AnthropicMessage", True),
    "/v1/messages/count_tokens": Endpoint("post", "How long a prompt is", "CountRequest", "Count", False),
    "/v1/embeddings": Endpoint(
        "post", "Vectors of texts (--runner pooling)", "EmbeddingRequest", "Embeddings", False
    ),
    "/v1/models": Endpoint("get", "The served names", None, "Models", False),
    "/v1/models/{name}": Endpoint("get", "One of them", None, "Model", False),
    "/tokenize": Endpoint("post", "Text to tokens", "TokenizeRequest", "Tokens", False),
    "/detokenize": Endpoint("post", "Tokens to text", "DetokenizeRequest", "Prompt", False),
    "/health": Endpoint("get", "Whether the engine makes steps", None, "Health", False),
    "/ready": Endpoint("get", "Whether requests are taken", None, "Ready", False),
    "/version": Endpoint("get", "The version of graft", None, "Version", False),
}
OPEN_PATHS = ("/health", "/ready", "/version")
REFUSALS = {
    "400": "what is asked cannot be",
    "401": "no key, or a wrong one",
    "404": "no such model",
    "408": "the body did not come",
    "413": "the body is too large",
    "429": "too many wait",
    "500": "the engine failed over this request",
    "503": "no engine is there",
}


def described(schema: Schema, what: str, *, stream: bool = False) -> Schema:
    events = {"text/event-stream": {"schema": {}}} if stream else {}
    return {"description": what, "content": {"application/json": {"schema": schema}, **events}}


def operation(path: str, one: Endpoint) -> Schema:
    error = ref("MessageError" if of_messages(path) else "Error")
    unready = ref(one.answer) if path in ("/health", "/ready") and one.answer else error
    responses = {status: described(error, why) for status, why in REFUSALS.items()}
    responses["503"] = described(unready, REFUSALS["503"])
    if one.answer is not None:
        responses["200"] = described(ref(one.answer), "the answer", stream=one.stream)
    made: Schema = {"summary": one.summary, "responses": responses}
    if one.body is not None:
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": ref(one.body)}}}
    if "{name}" in path:
        made["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": ref("ModelName")}]
    if path not in OPEN_PATHS:
        made["security"] = [{"key": []}, {}]
    return made


@cache
def openapi(names: tuple[str, ...]) -> Schema:
    """names: of the served model."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "graft serve", "version": __version__},
        "paths": {path: {one.method: operation(path, one)} for path, one in PATHS.items()},
        "components": {
            "schemas": {**SCHEMAS, "ModelName": {"enum": [*names, None]}},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
