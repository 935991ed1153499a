"""What each call of a graph costs, as measured on a device, and who measures it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

from torch.fx import Graph, GraphModule

from graft.base.errors import ProfileError
from graft.base.files import write_whole
from graft.ir.io.text import node_text
from graft.ir.streams import on_device


@dataclass(frozen=True)
class Costs:
    """Microseconds by node name. `event_us`: what a stream loses when it waits for another."""

    by_node: Mapping[str, float]
    event_us: float
    device: str
    versions: Mapping[str, str] = field(default_factory=dict)
    fingerprint: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    def save(self, path: Path) -> None:
        write_whole(path, self.to_json())


class Measure(Protocol):
    """Runs a graph on real inputs. The runtime provides one: transforms run nothing themselves."""

    def costs(self, gm: GraphModule) -> Costs: ...

    def whole(self, gm: GraphModule) -> float | None:
        """Microseconds of one call inside a CUDA graph, or None where there are none."""
        ...


def load_costs(path: Path, graph: Graph) -> Costs:
    """Raises ProfileError unless the file holds the costs of this graph."""
    try:
        costs = Costs(**json.loads(path.read_text()))
    except OSError as error:
        raise ProfileError(path, f"it cannot be read ({error})") from error
    except (ValueError, TypeError) as error:
        raise ProfileError(path, f"it is not a profile ({error})") from error
    if costs.fingerprint != fingerprint(graph):
        raise ProfileError(path, "it was measured on another graph")
    lacking = [node.name for node in graph.nodes if on_device(node) and node.name not in costs.by_node]
    if lacking:
        raise ProfileError(path, f"it has no cost for %{lacking[0]}")
    return costs


def fingerprint(graph: Graph) -> str:
    """Of what is called on what, under which names; weights and source lines do not count."""
    digest = blake2b(digest_size=16)
    for node in graph.nodes:
        digest.update(node_text(node, origin=False).encode())
    return digest.hexdigest()
