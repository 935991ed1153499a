"""Safe edits. Every new node gets its abstract value, its module stack and the name of the transform that made it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

from graft.base.errors import VerificationError
from graft.ir.nodes import dim_text, placeholders, tensor_val, val, where

INHERITED = ("nn_module_stack", "stack_trace", "source_fn_stack", "torch_fn")


class Editor:
    """Edits one graph on behalf of one transform."""

    def __init__(self, gm: GraphModule, made_by: str) -> None:
        self.gm = gm
        self.graph = gm.graph
        self.made_by = made_by
        self.abstract = AbstractCalls.of(gm)
        self.last_input: Node | None = None
        self.successors: dict[Node, Node] = {}  # what took the place of what
        self.changes: tuple[list[tuple[str, str]], list[str]] = ([], [])

    def call(
        self,
        target: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None = None,
        *,
        before: Node,
        like: Node,
    ) -> Node:
        """Inserts a call above `before`, with the origin of `like`."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, tuple(args), kwargs or {})
        return self._adopt(node, self.abstract(node), like)

    def parameter(self, name: str, tensor: torch.Tensor, *, before: Node, like: Node) -> Node:
        """Adds a parameter to the module, under a free name like `name`, and a node that reads it."""
        owner, _, leaf = name.rpartition(".")
        count = 1
        while attribute(self.gm, name) is not None:
            count += 1
            name = f"{owner}_{count}.{leaf}"
        parameter = torch.nn.Parameter(tensor, requires_grad=False)
        attach_state(self.gm, name, parameter)
        with self.graph.inserting_before(before):
            node = self.graph.get_attr(name)
        return self._adopt(node, self.abstract.state(parameter, like), like)

    def placeholder(self, name: str, value: torch.Tensor) -> Node:
        """Adds a graph input after the existing ones."""
        if self.last_input is None:
            self.last_input = placeholders(self.graph)[-1]
        with self.graph.inserting_after(self.last_input):
            node = self.graph.placeholder(name)
        self.last_input = node
        node.meta = {"val": value, "made_by": self.made_by}
        return node

    def replace(self, old: Node, new: Node) -> None:
        """Every reader of `old` reads `new`. Refuses a change of shape, dtype or device."""
        check_same_kind(old, new, self.made_by)
        self.changes[0].append((old.name, new.name))
        self.successors[old] = new
        old.replace_all_uses_with(new)

    def erase(self, node: Node) -> None:
        """Takes out a node that nobody reads any more."""
        self.changes[1].append(node.name)
        self.graph.erase_node(node)

    def current(self, node: Node) -> Node:
        """The node itself, or what took its place."""
        while node in self.successors:
            node = self.successors[node]
        return node

    def take_changes(self) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
        """Since the last time: names of what was replaced, each with what is read now, and of what was erased."""
        (replaced, erased), self.changes = self.changes, ([], [])
        return tuple(replaced), tuple(erased)

    def _adopt(self, node: Node, value: Any, like: Node) -> Node:
        node.meta = {key: like.meta[key] for key in INHERITED if key in like.meta}
        node.meta["val"] = value
        node.meta["made_by"] = self.made_by
        return node


def attribute(module: torch.nn.Module, name: str) -> Any:
    """What a dotted name leads to, or None."""
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def attach_state(module: torch.nn.Module, name: str, tensor: torch.Tensor, *, persistent: bool = True) -> None:
    """Puts a parameter or buffer at a dotted name; missing parents are made."""
    *parents, leaf = name.split(".")
    for parent in parents:
        if not hasattr(module, parent):
            module.add_module(parent, torch.nn.Module())
        module = getattr(module, parent)
    if isinstance(tensor, torch.nn.Parameter):
        module.register_parameter(leaf, tensor)
    else:
        module.register_buffer(leaf, tensor, persistent=persistent)


def second_module(gm: GraphModule) -> GraphModule:
    """Another module over a copy of the graph; parameters and buffers are shared."""
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    graph.set_codegen(copy.copy(gm.graph._codegen))
    twin = GraphModule(gm, graph)
    for name, parameter in gm.named_parameters(remove_duplicate=False):
        attach_state(twin, name, parameter)
    for name, buffer in gm.named_buffers(remove_duplicate=False):
        attach_state(twin, name, buffer, persistent=is_persistent(gm, name))
    return twin


def is_persistent(module: torch.nn.Module, name: str) -> bool:
    """Whether a buffer belongs to the module's state_dict."""
    owner, _, leaf = name.rpartition(".")
    return leaf not in module.get_submodule(owner)._non_persistent_buffers_set


def symbolic_sizes(like: Node, examples: Sequence[int]) -> list[torch.SymInt]:
    """A new symbol for each size of inputs that is not known until the graph runs.

    Examples are above 1, or torch would specialize on them. Each is a size of its own, whatever other symbols have
    its example: torch takes dims of equal examples for one size unless each is told to be dynamic.
    """
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext  # with sympy: 0.4 s

    mode, own = fake_mode(like), StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    return [mode.from_tensor(torch.empty(size), symbolic_context=own).shape[0] for size in examples]


def check_same_kind(old: Node, new: Node, transform: str) -> None:
    left, right = tensor_val(old), tensor_val(new)
    if left is None or right is None:
        return
    same = [str(s) for s in left.shape] == [str(s) for s in right.shape]
    if not same or left.dtype != right.dtype or left.device != right.device:
        raise VerificationError(
            f"{transform} would replace {where(old)} of {tuple(left.shape)} {left.dtype} {left.device} by"
            f" {tuple(right.shape)} {right.dtype} {right.device}"
        )


def abstract_call(node: Node) -> Any:
    """What a call gives, computed from the recorded values of its arguments; nothing runs for real."""
    args, kwargs = map_arg(node.args, val), map_arg(node.kwargs, val)
    mode = fake_mode(node)
    call = RULES.get(node.target, node.target)
    sizes = mode.shape_env if mode is not None else None
    fixed = len(sizes.replacements) if sizes is not None else 0
    with mode or nullcontext(), torch.no_grad():
        result = call(*args, **kwargs)
    if sizes is not None and len(sizes.replacements) > fixed:
        refuse_fixed(node, list(sizes.replacements.items())[fixed:])
    return result


def refuse_fixed(node: Node, replaced: Sequence[tuple[Any, Any]]) -> None:
    """A call whose shape rule asks for a number turns a size that is open into that of the example, in every node."""
    sizes = ", ".join(f"{symbol} = {found}" for symbol, found in replaced if found.is_number)
    if sizes:
        raise VerificationError(
            f"{where(node)} ({node.target}) fixes sizes that are open in the graph ({sizes}): torch's rule"
            " for its shape asks for their numbers; write it with other ops, as torch.cat with zeros for a padding"
        )


def linear_result(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:  # noqa: ARG001
    return x.new_empty((*x.shape[:-1], *weight.shape[:-1]))  # a weight of one dim gives one number a row


def matmul_result(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if left.dim() < 2 or right.dim() < 2:
        return torch.matmul(left, right)
    return left.narrow(-1, 0, 1) * right.narrow(-2, 0, 1)  # broadcasts to the same shape and dtype


def padded_result(x: torch.Tensor, pad: Sequence[int], *_: Any) -> torch.Tensor:
    """Two numbers a dim, from the last dim on; whatever fills them."""
    sizes = list(x.shape)
    for index in range(len(pad) // 2):
        sizes[-1 - index] += pad[2 * index] + pad[2 * index + 1]
    return x.new_empty(sizes)


def attention_result(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any) -> Any:
    """Of a GPU torch pads the mask, for which it wants its sizes."""
    alike = -3 if named.get("enable_gqa") else -2
    if any(list(map(str, one.shape[:alike])) != list(map(str, query.shape[:alike])) for one in (key, value)):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, *rest, **named)
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


# Rules of torch's that refuse symbolic sizes (2.11: the first two), or ask for their numbers
RULES: dict[Any, Any] = {
    torch.ops.aten.linear.default: linear_result,
    torch.ops.aten.matmul.default: matmul_result,
    torch.ops.aten.constant_pad_nd.default: padded_result,
    torch.ops.aten.pad.default: padded_result,
    torch.ops.aten.scaled_dot_product_attention.default: attention_result,
}


class AbstractCalls:
    """Abstract results by what was called on what kinds of values: equal layers are computed once.

    Two calls are equal when they call one op with equal literals on arguments of equal shape, strides, dtype and
    device. Symbolic sizes make their text slow (20 µs each), so it is kept by value.
    """

    def __init__(self) -> None:
        self.results: dict[Any, Any] = {}
        self.kinds: dict[int, tuple[Any, str]] = {}  # the value is held, so that its id stays its own

    @staticmethod
    def of(gm: GraphModule) -> AbstractCalls:
        """The one of a graph module, shared by all who edit or verify it."""
        return gm.meta.setdefault("graft_abstract_calls", AbstractCalls())

    def __call__(self, node: Node) -> Any:
        args, kwargs = map_arg(node.args, self.kind), map_arg(node.kwargs, self.kind)
        key = (node.target, str(args), str(kwargs))
        if key not in self.results:
            self.results[key] = abstract_call(node)
        return self.results[key]

    def state(self, tensor: torch.Tensor, like: Node) -> torch.Tensor:
        """The abstract value of a parameter or buffer, in the fake mode of `like`."""
        key = kind_text(tensor)
        if key not in self.results:
            mode = fake_mode(like)
            self.results[key] = mode.from_tensor(tensor, static_shapes=True) if mode is not None else tensor
        return self.results[key]

    def kind(self, node: Node) -> str:
        value = val(node)
        if id(value) not in self.kinds:
            self.kinds[id(value)] = (value, kind_text(value))
        return self.kinds[id(value)][1]


def kind_text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{[*map(dim_text, value.shape)]}{[*map(dim_text, value.stride())]}{value.dtype}{value.device}"
    if isinstance(value, (list, tuple)):
        return "(" + ",".join(kind_text(item) for item in value) + ")"
    return str(value)


def fake_mode(node: Node) -> Any:
    """The FakeTensorMode of a node's neighbourhood."""
    for source in (node, *node.all_input_nodes):
        value = val(source)
        for item in value if isinstance(value, (list, tuple)) else [value]:
            mode = getattr(item, "fake_mode", None)
            if mode is not None:
                return mode
    return None
