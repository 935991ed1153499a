"""Where a request stands beside others: vLLM's `priority`, and its `cache_salt`, which nobody can be given here."""

from __future__ import annotations

from graft.base.errors import HttpRefused
from graft.serve.protocol.values import Json, Refused, whole

POLICIES = ("fcfs", "priority")
MOST = 2**31 - 1
CACHE_SALT: Refused = {
    "cache_salt": (
        lambda v: v == "",
        "the prefix cache is one for all; start the server with --no-enable-prefix-caching where one client must not"
        " learn what others have asked",
    )
}


def priority(body: Json) -> int:
    """Lower goes first; 0 where nothing is said."""
    return whole(body, "priority", -MOST, MOST) or 0


def check_priority(asked: int, policy: str) -> None:
    if asked and policy != "priority":
        raise HttpRefused(
            "priority: this server begins requests in the order in which they come; start it with"
            " --scheduling-policy priority",
            param="priority",
            code="unsupported_parameter",
        )
