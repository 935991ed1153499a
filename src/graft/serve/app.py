"""The endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from graft import __version__
from graft.base.errors import HttpRefused
from graft.serve.cache_events import EventReader, event_stream
from graft.serve.dashboard import dashboard_stream
from graft.serve.embedding import Embedding, asked_embeddings, from_embeddings
from graft.serve.generation import (
    Generation,
    from_chat,
    from_completion,
    from_message,
    from_response,
    from_tokens,
    prompt_of,
)
from graft.serve.guard import Guard
from graft.serve.http import EventStream, json_response, read_body, while_connected
from graft.serve.openapi import openapi
from graft.serve.pages import page
from graft.serve.protocol import messages, requests, token_requests, values
from graft.serve.protocol.responses import response
from graft.serve.protocol.tools import asked_tools
from graft.serve.state import ServerState

PREFLIGHT = 600  # seconds that a browser may keep the answer to whether it may ask
Handler = Callable[[ServerState, HttpRequest], Awaitable[Response]]


async def chat_completions(state: ServerState, http: HttpRequest) -> Response:
    body = await json_body(state, http)
    text, model = state.loaded_to("generate", http.scope["path"])
    asked = requests.chat(body, state.options.names)
    return await respond(state, http, await from_chat(asked, text, model, http.state.request_id))


async def completions(state: ServerState, http: HttpRequest) -> Response:
    body = await json_body(state, http)
    text, model = state.loaded_to("generate", http.scope["path"])
    asked = requests.completion(body, state.options.names, model.vocabulary)
    return await respond(state, http, await from_completion(asked, text, model, http.state.request_id))


async def responses(state: ServerState, http: HttpRequest) -> Response:
    body = await json_body(state, http)
    text, model = state.loaded_to("generate", http.scope["path"])
    asked = response(body, state.options.names)
    return await respond(state, http, await from_response(asked, text, model, http.state.request_id, body))


async def anthropic_messages(state: ServerState, http: HttpRequest) -> Response:
    body = await json_body(state, http)
    text, model = state.loaded_to("generate", http.scope["path"])
    asked = messages.message_request(body, state.options.names)
    return await respond(state, http, await from_message(asked, text, model, http.state.request_id))


async def tokens_in_and_out(state: ServerState, http: HttpRequest) -> Response:
    body = await json_body(state, http)
    text, model = state.loaded_to("generate", http.scope["path"])
    asked = token_requests.token_request(body, state.options.names, model.vocabulary)
    return await respond(state, http, await from_tokens(asked, text, model, http.state.request_id))


async def count_tokens(state: ServerState, http: HttpRequest) -> Response:
    """Anthropic's: how long a prompt would be."""
    body = await json_body(state, http)
    text, _ = state.loaded_to("generate", http.scope["path"])
    asked = messages.message_request(body, state.options.names, counting=True)
    return json_response({"input_tokens": len(await prompt_of(asked, text))})


async def respond(state: ServerState, http: HttpRequest, made: Generation | Embedding) -> Response:
    """Whoever leaves (the client, the task) ends the engine's work; the guard does that when the response is over."""
    ticket = made.enter(state.link)
    ticket.id, ticket.path = http.state.request_id, http.scope["path"]
    http.state.generation = made
    if isinstance(made, Generation) and made.stream:
        return EventStream(made.events(ticket), ticket.bell, state.options.slow_client_timeout)
    return Response(await while_connected(made.answer(ticket), http.receive), media_type="application/json")


async def models(state: ServerState, _: HttpRequest) -> Response:
    return json_response({"object": "list", "data": [card(state, name) for name in state.options.names]})


async def model(state: ServerState, http: HttpRequest) -> Response:
    return json_response(card(state, requests.served_name({"model": http.path_params["name"]}, state.options.names)))


def card(state: ServerState, name: str) -> dict[str, Any]:
    _, served = state.loaded
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "graft",
        "root": served.name,
        "parent": None,
        "max_model_len": served.context,
    }


async def tokenize(state: ServerState, http: HttpRequest) -> Response:
    """vLLM's: a prompt, or a conversation."""
    body = await json_body(state, http)
    text, served = state.loaded
    requests.served_name(body, state.options.names)
    if body.get("messages") is not None:
        said, options, tools = requests.messages(body["messages"]), requests.template_options(body), asked_tools(body)
        turn = requests.turn(body, said)
        shown = None if tools is None else tools.tools
        ids = await text.chat(
            said, generation=turn["generation_prompt"], options=options, tools=shown, continues=turn["continues"]
        )
    else:
        special = values.boolean(body, "add_special_tokens", True)
        ids = await text.encode(values.text(body.get("prompt"), "prompt"), special)
    told: dict[str, Any] = {"count": len(ids), "max_model_len": served.context, "tokens": ids, "token_strs": None}
    if values.boolean(body, "return_token_strs"):
        told["token_strs"] = await asyncio.to_thread(lambda: [text.piece(token) for token in ids])
    return json_response(told)


async def detokenize(state: ServerState, http: HttpRequest) -> Response:
    body = await json_body(state, http)
    text, served = state.loaded
    requests.served_name(body, state.options.names)
    ids = values.token_ids(body.get("tokens"), "tokens", served.vocabulary)
    return json_response({"prompt": await asyncio.to_thread(text.decode, ids, skip_special_tokens=False)})


async def embeddings(state: ServerState, http: HttpRequest) -> Response:
    body = await json_body(state, http)
    text, served = state.loaded_to("pooling", http.scope["path"])
    asked = asked_embeddings(body, state.options.names, served)
    return await respond(state, http, await from_embeddings(asked, text, served))


async def kv_cache_events(state: ServerState, _: HttpRequest) -> Response:
    if not state.options.enable_kv_cache_events:
        raise HttpRefused(
            "events of the cache have the tokens of everybody's prompts, so they are off; start the server with"
            " --enable-kv-cache-events",
            status=404,
            code="unsupported_endpoint",
        )
    _text, _model = state.loaded
    reader = EventReader()
    return EventStream(event_stream(state.link.cache, reader), reader.bell, state.options.slow_client_timeout)


async def dashboard(state: ServerState, _: HttpRequest) -> Response:
    """What the page shows, as long as somebody looks."""
    reader = EventReader()
    return EventStream(dashboard_stream(state, reader), reader.bell, state.options.slow_client_timeout)


async def health(state: ServerState, _: HttpRequest) -> Response:
    alive, told = state.health()
    return json_response(told, 200 if alive else 503)


async def ready(state: ServerState, _: HttpRequest) -> Response:
    return json_response({"ready": state.ready}, 200 if state.ready else 503)


async def version(_state: ServerState, _: HttpRequest) -> Response:
    return json_response({"version": __version__})


async def metrics(state: ServerState, _: HttpRequest) -> Response:
    text = state.metrics.text(state.options.names[0], state.link.load, state.log.lost)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def schema(state: ServerState, _: HttpRequest) -> Response:
    return json_response(openapi(state.options.names))


async def show_page(name: str, _state: ServerState, _: HttpRequest) -> Response:
    text, headers = page(name)
    return Response(text, headers=headers, media_type="text/html")


async def json_body(state: ServerState, http: HttpRequest) -> dict[str, Any]:
    return values.parse_json(await read_body(http, state.options.max_body_size, state.options.slow_client_timeout))


ROUTES: tuple[tuple[str, str, Handler], ...] = (  # looked through in this order
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/responses", responses),
    ("POST", messages.PATH, anthropic_messages),
    ("POST", f"{messages.PATH}/count_tokens", count_tokens),
    ("POST", token_requests.PATH, tokens_in_and_out),
    ("GET", "/", partial(show_page, "chat")),
    ("GET", "/dashboard", partial(show_page, "dashboard")),
    ("GET", "/v1/dashboard", dashboard),
    ("GET", "/openapi.json", schema),
    ("GET", "/v1/models", models),
    ("GET", "/v1/models/{name:path}", model),
    ("POST", "/v1/embeddings", embeddings),
    ("GET", "/v1/kv_cache_events", kv_cache_events),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
    ("GET", "/health", health),
    ("GET", "/ready", ready),
    ("GET", "/version", version),
    ("GET", "/metrics", metrics),
)


def make_app(state: ServerState) -> ASGIApp:
    """Origins are looked at first: a browser asks without a key whether it may, and reads errors only with them."""
    routes = [Route(path, partial(handler, state), methods=[method]) for method, path, handler in ROUTES]
    guard = Guard(Router(routes, redirect_slashes=False), state)
    if not state.options.allowed_origins:
        return guard
    exposed = ("X-Request-Id", "Request-Id", "Retry-After")
    return CORSMiddleware(  # any header: clients' own libraries send a dozen of theirs (X-Stainless-…)
        guard, state.options.allowed_origins, ("GET", "POST"), ("*",), expose_headers=exposed, max_age=PREFLIGHT
    )
