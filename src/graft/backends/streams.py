"""Runs the stream ops of a graph on CUDA streams.

    before:  graft.stream_switch(1); graft.stream_wait(3); %y = linear(%x, %w); graft.stream_record(4)
    after:   wait(1, 3); %y = on_stream_1_linear(%x, %w); record(1, 4)

Stream 0 is whatever stream is current when the graph is called. It stays current: a call on another stream makes that
one current for its own time, so that an error in the middle leaves nothing switched. In a capture the side streams
join it by the first event that they wait for, and have been waited for when the graph returns (`check_streams`).

Memory. The allocator gives a block back to the stream it was allocated on as soon as the host drops it. Nothing is
told to the allocator (`record_stream`): it would hold blocks back until events are over, and in a capture until its
end. Instead `graft.stream_keep` takes the tensor, so that the generated code holds it until the streams have met; the
checker has proven that this is late enough, for eager calls and for the pool of a capture alike.

Side streams and events belong to one thread and one caller's stream: two threads never record the same event. torch
hands out 32 streams in turn, so that a side stream may be somebody else's too. Hence, outside of a capture (whose
memory is its own), the side streams wait for the caller's at the end of a call: whoever allocates on them next comes
after all that this call read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from graft.ir.nodes import leaves, output_node, val
from graft.ir.streams import drop_streams, has_streams, on_device, stream_op

MOST_TRIES = 64  # torch has 32 streams and hands them out in turn; one of them may be the caller's


@dataclass
class CallerStreams:
    """What goes with one caller's stream."""

    streams: dict[int, torch.cuda.Stream] = field(default_factory=dict)
    events: dict[int, torch.cuda.Event] = field(default_factory=dict)


class Streams:
    """The side streams of one lowered graph."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.local = threading.local()

    def side(self, main: torch.cuda.Stream) -> CallerStreams:
        sides: dict[int, CallerStreams] = self.local.__dict__.setdefault("sides", {})
        return sides.setdefault(main.cuda_stream, CallerStreams())

    def stream(self, main: torch.cuda.Stream, number: int) -> torch.cuda.Stream:
        if number == 0:
            return main
        streams = self.side(main).streams
        if number not in streams:
            streams[number] = self.another({main.cuda_stream, *(stream.cuda_stream for stream in streams.values())})
        return streams[number]

    def another(self, taken: set[int]) -> torch.cuda.Stream:
        """One that is not taken; where all are, any will do: its calls run one after another."""
        found = torch.cuda.Stream(self.device)
        for _ in range(MOST_TRIES):
            if found.cuda_stream not in taken:
                break
            found = torch.cuda.Stream(self.device)
        return found

    def record(self, number: int, event: int) -> None:
        main = torch.cuda.current_stream(self.device)
        events = self.side(main).events
        if event not in events:
            events[event] = torch.cuda.Event()
        events[event].record(self.stream(main, number))

    def wait(self, number: int, event: int) -> None:
        main = torch.cuda.current_stream(self.device)
        self.stream(main, number).wait_event(self.side(main).events[event])

    def rejoin(self) -> None:
        """What is allocated on the side streams from now on is written after this call."""
        main = torch.cuda.current_stream(self.device)
        if not torch.cuda.is_current_stream_capturing():
            for stream in self.side(main).streams.values():
                stream.wait_stream(main)

    def on(self, number: int, target: Callable[..., Any]) -> Callable[..., Any]:
        """`target` on a side stream."""

        def run(*args: Any, **kwargs: Any) -> Any:
            main = torch.cuda.current_stream(self.device)
            with torch.cuda.stream(self.stream(main, number)):
                return target(*args, **kwargs)

        run.__name__ = f"on_stream_{number}_{getattr(target, '__name__', 'call')}".replace(".", "_")
        return run


def hold(_: object) -> None:
    """Its argument is alive when it is called."""


def placements(graph: Graph) -> dict[Node, int]:
    """The stream of every call on the device and of every record and wait; empty for a graph without stream ops."""
    if not has_streams(graph):
        return {}
    found, current = {}, 0
    for node in graph.nodes:
        kind, number = stream_op(node) or ("", 0)
        if kind == "switch":
            current = number
        elif kind in ("record", "wait") or on_device(node):
            found[node] = current
    return found


def bind_streams(graph: Graph, placed: Mapping[Node, int]) -> str:
    """Gives the stream ops their meaning in a graph whose calls are bound to kernels; what came of it."""
    device = device_of(graph)
    if device.type != "cuda":
        drop_streams(graph)
        return f"nothing (the graph is on {device}, where calls run one after another)"
    streams = Streams(device)
    for node in list(graph.nodes):
        kind, number = stream_op(node) or ("", 0)
        if kind == "switch":
            graph.erase_node(node)
        elif kind in ("record", "wait"):
            node.target = streams.record if kind == "record" else streams.wait
            node.args = (placed[node], number)
        elif kind == "keep":
            node.target = hold
        elif placed.get(node, 0):
            node.target = streams.on(placed[node], node.target)
    with graph.inserting_before(output_node(graph)):
        graph.call_function(streams.rejoin)
    return f"{len(set(placed.values()))} CUDA streams"


def device_of(graph: Graph) -> torch.device:
    """The first device that is no CPU, or the CPU."""
    tensors = [item for node in graph.nodes for item in leaves(val(node)) if isinstance(item, torch.Tensor)]
    found = (tensor.device for tensor in tensors if tensor.device.type != "cpu")
    return next(found, torch.device("cpu"))
