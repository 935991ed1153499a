"""--kv-events-config: vLLM's JSON object that says where events of the cache are published."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from graft.base.errors import UsageError, near

OPTION = "--kv-events-config"


@dataclass(frozen=True)
class KvEventsConfig:
    """vLLM's names and defaults. An endpoint with * or ::, or of ipc://, is bound, another connected to.

    buffer_steps: batches that are kept for replay. hwm: messages that ZMQ keeps for a slow subscriber.
    encoding: ours; events as maps, as vLLM sends them since June 2026, or as arrays, as it did before.
    """

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    encoding: str = "map"

    @property
    def on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"


def parse_config(text: str | None) -> KvEventsConfig:
    if text is None:
        return KvEventsConfig()
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{OPTION} must be a JSON object: {error}") from error
    if not isinstance(given, dict):
        raise UsageError(f'{OPTION} must be a JSON object like {{"enable_kv_cache_events": true}}, not {text!r:.80}')
    known = {one.name: one for one in fields(KvEventsConfig)}
    for name, value in given.items():
        if name not in known:
            raise UsageError(f"{OPTION}: unknown key {name!r}{near(name, known)}")
        check_type(name, value, known[name].default)
    found = KvEventsConfig(**given)
    for name, allowed in (("publisher", ("zmq", "null")), ("encoding", ("map", "array"))):
        if getattr(found, name) not in allowed:
            raise UsageError(f"{OPTION}: {name} must be {' or '.join(allowed)}, not {getattr(found, name)!r}")
    return found


def check_type(name: str, value: object, default: Any) -> None:
    if name == "replay_endpoint":
        fine, kind = value is None or isinstance(value, str), "an address or null"
    elif isinstance(default, bool):
        fine, kind = isinstance(value, bool), "true or false"
    elif isinstance(default, int):
        fine, kind = isinstance(value, int) and not isinstance(value, bool) and value > 0, "a whole number above 0"
    else:
        fine, kind = isinstance(value, str), "a text"
    if not fine:
        raise UsageError(f"{OPTION}: {name} must be {kind}, not {value!r}")
