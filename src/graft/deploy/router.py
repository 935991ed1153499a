"""Ray Serve's request router for replicas: the policy's choice first, then the others by load.

It runs in the gateway's process, in a thread of Ray's; the gateway feeds the index that it asks.
"""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from graft.deploy import routing_state
from graft.deploy.policy import RoutePolicy

NOBODY = 0.1  # seconds until it is asked again who is there


class PrefixRouter(RequestRouter):
    def initialize_state(self, **settings: Any) -> None:
        self.policy = RoutePolicy(**settings)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        asked = pending_request.kwargs if pending_request is not None else {}
        state = routing_state.STATE  # by its module: this one is sent as a copy
        by_name = {one.replica_id.unique_id: one for one in candidate_replicas}
        fit = {name: by_name[name] for name in state.fit(by_name, set(asked.get("avoid", ())))}
        if not fit:
            await asyncio.sleep(NOBODY)  # Ray asks again at once
            return []
        load = {name: self.replica_queue_len_cache.get(one.replica_id) or 0 for name, one in fit.items()}
        tokens = array("I", asked.get("tokens", b""))
        with state.lock:
            choice = state.index.choose(tokens, load, self.policy)
            if tokens:
                state.count(choice)
        others = sorted((name for name in fit if name != choice.replica), key=lambda name: load[name])
        return [[fit[name]] for name in (choice.replica, *others)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:  # noqa: ARG002
        routing_state.STATE.note_sent(pending_request.kwargs.get("ticket", ""), replica_id.unique_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Ray drops it here, until the controller, which has not noticed yet, names it again."""
        routing_state.STATE.lose(replica_id.unique_id)
        super().on_replica_actor_died(replica_id)
