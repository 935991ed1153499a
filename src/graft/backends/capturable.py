"""What a CUDA graph cannot hold, seen before anything runs: answers that the host waits for, and host memory.

A capture launches the same kernels with the same sizes every time. A number that is read back to choose them
(`item`, `nonzero`, a boolean index), a tensor of host memory, and a call whose writes cannot be seen are refused.
"""

from __future__ import annotations

from operator import getitem

import torch
from torch.fx import Graph, Node

from graft.base.errors import CaptureRefused
from graft.ir.effects import mutated_roots
from graft.ir.nodes import OpOverload, is_op, leaves, tensor_val, val, where
from graft.memory.uninitialised import seed_results

aten = torch.ops.aten
READS_BACK = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
INDEX = (aten.index.Tensor, aten._unsafe_index.Tensor)
INDEX_PUT = (aten.index_put.default, aten.index_put_.default, aten._unsafe_index_put.default)
# Ops whose kernels ask for a value although their tags do not say so.
ASKS = (aten.is_nonzero.default, aten.masked_scatter.default, aten.masked_scatter_.default)
# They take a value of host memory as a number of the launch, or pass it on as a value of host memory.
TAKES_HOST = (
    aten.lift_fresh_copy.default,
    aten.lift_fresh.default,
    aten.detach.default,
    aten.detach_.default,
    aten.masked_fill.Tensor,
    aten.masked_fill_.Tensor,
    aten.fill.Tensor,
    aten.fill_.Tensor,
)
INSTEAD = "use backend='eager' or 'inductor' for it"


def capture_device(graph: Graph) -> torch.device:
    """The one device that the graph is captured on. Raises CaptureRefused, naming the node that is in the way."""
    devices = {
        item.device: node for node in graph.nodes for item in leaves(val(node)) if isinstance(item, torch.Tensor)
    }
    cuda = [device for device in devices if device.type == "cuda"]
    strange = next((d for d in devices if d.type not in ("cpu", "cuda")), None)
    if strange is not None:
        raise refusal(devices[strange], f"is on {strange}, and only CUDA and CPU tensors can be captured")
    if len(cuda) > 1:
        raise refusal(devices[cuda[1]], f"is on {cuda[1]}, and others are on {cuda[0]}; a capture has one device")
    for node in graph.nodes:
        refuse_sparse(node)
        refuse_call(node)
    if cuda:
        refuse_host_memory(graph)
    return cuda[0] if cuda else torch.device("cpu")


def refusal(node: Node, problem: str) -> CaptureRefused:
    return CaptureRefused(f"{where(node)} {problem}; {INSTEAD}")


def refuse_sparse(node: Node) -> None:
    layouts = [item.layout for item in leaves(val(node)) if isinstance(item, torch.Tensor)]
    sparse = next((layout for layout in layouts if layout is not torch.strided), None)
    if sparse is not None:
        raise refusal(node, f"is {sparse}, which has no one address for a replay to keep")


def refuse_call(node: Node) -> None:
    if node.op in ("call_module", "call_method"):
        raise refusal(node, f"calls {node.target}, and what it writes cannot be seen")
    if node.op != "call_function":
        return
    if getattr(node.target, "namespace", "") == "higher_order":
        raise refusal(node, f"is the higher-order op {node.target}, and what its graphs write cannot be seen")
    if node.kwargs.get("generator") is not None:
        raise refusal(node, "samples from a generator of its own, whose state a replay does not advance")
    if gives_seed(node):
        raise refusal(node, f"({node.target}) gives the state of its random numbers, which a capture has otherwise")
    if node.meta.get("unbacked_bindings") or is_op(node, *ASKS) or reads_back(node):
        raise refusal(
            node, f"({node.target}) needs a value of a tensor on the host, which a replay does not wait for"
        )


def gives_seed(node: Node) -> bool:
    seeds = seed_results(node)
    return any(reader.target is getitem and reader.args[1] in seeds and reader.users for reader in node.users)


def reads_back(node: Node) -> bool:
    if is_op(node, *INDEX, *INDEX_PUT):
        masks = [leaf for leaf in leaves(node.args[1]) if is_mask(leaf)]
        # x[mask] = 0 becomes masked_fill, which asks for nothing; every other mask is counted on the host
        fills = is_op(node, *INDEX_PUT) and len(masks) == 1 and is_host_number(node.args[2])
        return bool(masks) and not fills
    return isinstance(node.target, OpOverload) and any(tag in node.target.tags for tag in READS_BACK)


def is_mask(value: object) -> bool:
    tensor = tensor_val(value)
    return tensor is not None and tensor.dtype in (torch.bool, torch.uint8)


def is_host_number(value: object) -> bool:
    tensor = tensor_val(value)
    return tensor is not None and tensor.device.type == "cpu" and tensor.dim() == 0


def refuse_host_memory(graph: Graph) -> None:
    """Numbers in host memory are read during capture. That is right for constants of the graph and nothing else."""
    written = mutated_roots(graph)
    constants = set()
    for node in graph.nodes:
        if node.op == "call_function":
            refuse_reader(node, constants)
        tensor = tensor_val(node)
        if tensor is None or tensor.device.type != "cpu":
            continue
        if node.op == "placeholder":
            raise refusal(node, "is a CPU tensor, whose values a replay would not read; pass it on the GPU")
        if tensor.dim() > 0 or node in written:
            raise refusal(node, "lies in CPU memory, which a capture does not work on; move it to the GPU")
        constants.add(node)


def refuse_reader(node: Node, constants: set[Node]) -> None:
    """A call may use CPU constants as numbers, or make a CPU constant of CPU constants alone."""
    tensor = tensor_val(node)
    from_host = [arg for arg in node.all_input_nodes if arg in constants]
    if tensor is not None and tensor.device.type == "cpu" and len(from_host) < len(node.all_input_nodes):
        raise refusal(node, "moves values to CPU memory, which a replay does not wait for")
    tags = node.target.tags if isinstance(node.target, OpOverload) else ()
    fills = is_op(node, *INDEX_PUT) and from_host == [node.args[2]]
    if from_host and not (torch.Tag.pointwise in tags or is_op(node, *TAKES_HOST) or fills):
        raise refusal(
            node, f"({node.target}) copies %{from_host[0].name} from CPU memory; make it a tensor on the GPU"
        )
