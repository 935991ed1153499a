"""How a graph's flat inputs and outputs are nested: the signature that its code takes apart and puts together."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from typing import Any

from torch.fx import Graph
from torch.fx.graph import CodeGen, _PyTreeCodeGen, _PyTreeInfo
from torch.utils import _pytree as pytree

from graft.base.errors import DumpError

KNOWN_HOMES = ("torch.", "transformers.")  # modules that may be imported because a stored structure names them


def nesting(graph: Graph) -> Any:
    """The names and the structure of inputs and outputs, or None for a graph of plain positional inputs."""
    return getattr(graph._codegen, "pytree_info", None)


def unflatten(values: Sequence[Any], spec: Any) -> Any:
    """Flat results in the structure of `spec`."""
    return pytree.tree_unflatten(values, spec)


def result_names(spec: Any, root: str = "result") -> list[str]:
    """`result`, or for each of several where it stands: `result[0]`, `result.logits`."""
    paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(range(spec.num_leaves), spec))
    return [root + "".join(map(step, path)) for path, _ in paths]


def step(key: Any) -> str:
    if isinstance(key, pytree.SequenceKey):
        return f"[{key.idx}]"
    return f".{key.name if isinstance(key, pytree.GetAttrKey) else key.key}"


def takes_keywords(spec: Any) -> bool:
    """`(args, kwargs)`, as torch.export nests inputs."""
    return spec.type is tuple and spec.num_children == 2 and spec.child(1).type is dict


def add_keywords(graph: Graph, names: Sequence[str]) -> None:
    """The last inputs of the graph, one for each name, are given by keyword (or last, by position)."""
    info = nesting(graph)
    if info is None or not names:
        return
    spec = info.in_spec
    args, kwargs = (spec.child(0), spec.child(1)) if takes_keywords(spec) else (spec, pytree.treespec_dict({}))
    given = dict(zip(kwargs.context, kwargs.children(), strict=True))
    given |= {name: pytree.treespec_leaf() for name in names}
    nested = pytree.treespec_tuple([args, pytree.treespec_dict(given)])
    graph.set_codegen(_PyTreeCodeGen(info._replace(orig_args=[*info.orig_args, *names], in_spec=nested)))


def drop_keywords(graph: Graph, names: Sequence[str]) -> None:
    """Takes back what `add_keywords` did."""
    info = nesting(graph)
    if info is None or not names:
        return
    args, kwargs = info.in_spec.child(0), info.in_spec.child(1)
    given = {k: v for k, v in zip(kwargs.context, kwargs.children(), strict=True) if k not in names}
    nested = pytree.treespec_tuple([args, pytree.treespec_dict(given)])
    kept = [name for name in info.orig_args if name not in names]
    graph.set_codegen(_PyTreeCodeGen(info._replace(orig_args=kept, in_spec=nested)))


def encode_nesting(graph: Graph) -> dict[str, Any] | None:
    info = nesting(graph)
    if info is None:
        return None
    out = dump_spec(info.out_spec, "outputs") if info.out_spec is not None else None
    return {"names": list(info.orig_args), "inputs": dump_spec(info.in_spec, "inputs"), "outputs": out}


def dump_spec(spec: Any, what: str) -> str:
    try:
        return pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise DumpError(
            f"the structure of the {what} cannot be stored: {str(error).rstrip('.')}. Return tuples, lists and dicts,"
            " or register the class with torch.utils._pytree.register_pytree_node and a serialized_type_name"
        ) from error


def decode_nesting(entry: dict[str, Any] | None) -> CodeGen:
    if entry is None:
        return CodeGen()
    if not all(name.isidentifier() for name in entry["names"]):
        raise DumpError(f"the dump names its inputs {entry['names']}, which are not all names; it is damaged")
    inputs, outputs = load_spec(entry["inputs"]), entry["outputs"] and load_spec(entry["outputs"])
    return _PyTreeCodeGen(_PyTreeInfo(entry["names"], inputs, outputs))


def load_spec(text: str) -> Any:
    """Classes of Transformers register themselves when their module is imported, so that is done."""
    for name in sorted(type_names(json.loads(text))):
        if name.startswith(KNOWN_HOMES):
            import_home(name)
    try:
        return pytree.treespec_loads(text)
    except (NotImplementedError, KeyError, ValueError) as error:
        raise DumpError(
            f"the structure of inputs or outputs names a class that is not registered here: {error};"
            " import the module that defines it first"
        ) from error


def type_names(spec: Any) -> set[str]:
    if isinstance(spec, list):
        return set().union(*(type_names(item) for item in spec))
    if not isinstance(spec, dict):
        return set()
    own = {spec["type"]} if isinstance(spec.get("type"), str) else set()
    return own | type_names(spec.get("children_spec", []))


def import_home(name: str) -> None:
    try:
        importlib.import_module(name.rpartition(".")[0])
    except ImportError as error:
        raise DumpError(f"the graph returns a {name}, whose module cannot be imported here: {error}") from error
