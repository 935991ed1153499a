"""Ray Serve's request router for replicas: the policy's choice first, then the others by load.

It runs in the gateway's process, in a thread of Ray's; the gateway feeds the index that it asks.
"""

from __future__ import annotations

from array import array
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from graft.deploy import routing_state
from graft.deploy.policy import RoutePolicy


class PrefixRouter(RequestRouter):
    def initialize_state(self, **settings: Any) -> None:
        self.policy = RoutePolicy(**settings)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        asked = pending_request.kwargs if pending_request is not None else {}
        avoided = set(asked.get("avoid", ()))
        by_name = {one.replica_id.unique_id: one for one in candidate_replicas}
        fit = {name: one for name, one in by_name.items() if name not in avoided} or by_name
        if not fit:
            return []
        load = {name: self.replica_queue_len_cache.get(one.replica_id) or 0 for name, one in fit.items()}
        tokens = array("I", asked.get("tokens", b""))
        state = routing_state.STATE  # by its module: this one is sent as a copy
        with state.lock:
            choice = state.index.choose(tokens, load, self.policy)
            if tokens:
                state.count(choice)
        others = sorted((name for name in fit if name != choice.replica), key=lambda name: load[name])
        return [[fit[name]] for name in (choice.replica, *others)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:  # noqa: ARG002
        routing_state.STATE.note_sent(pending_request.kwargs.get("ticket", ""), replica_id.unique_id)
