"""A transform that merges linear layers of given names, as files of a package: no op and no kernel, the library's own
walk (passes/library/merge) over these layers alone."""

from __future__ import annotations

from collections.abc import Sequence

from graft.base.errors import UsageError
from graft.base.files import write_together
from graft.workbench.scaffold import names
from graft.workbench.scaffold.destination import Destination
from graft.workbench.scaffold.names import class_name
from graft.workbench.scaffold.package import check_package, package_files
from graft.workbench.scaffold.plan import Written
from graft.workbench.scaffold.render import fill

STAGE, AFTER = "fuse", "merge_qkv, merge_gate_up, merge_gemms"  # what those leave


def write_merge(
    name: str, layers: Sequence[str], destination: Destination, *, force: bool = False, enabled: bool = False
) -> Written:
    """layers: names of modules, in the order in which their rows are laid below each other."""
    names.check_name(name)
    names.check_free(name, destination.transform(name), force)
    if len(layers) < 2 or len(set(layers)) < len(layers) or not all(layer.isidentifier() for layer in layers):
        raise UsageError(f"{', '.join(layers) or 'none'}: name two layers or more, each once")
    check_package(destination)
    entry = f"stage: {STAGE}, enabled: {str(enabled).lower()}, after: [{AFTER}]"
    new, changed = package_files(destination, name, entry, op=False)
    new[destination.transform(name)] = fill("merge", texts(name, layers))
    new[destination.test(name)] = fill("test_merge", {"name": name, "module": destination.module(name)})
    taken = [path for path in new if path.exists()]
    if taken and not force:
        raise UsageError(f"{taken[0]} is there already; choose another name, or --force to write it anew")
    write_together({**new, **changed})
    return Written(name, destination.root, False, tuple(new), tuple(changed), package=destination.package)


def texts(name: str, layers: Sequence[str]) -> dict[str, str]:
    before = [f"%{layer} = linear(%x, %w_{layer})" for layer in layers]
    pieces = [f"%{layer} = slice(%merged, -1, …)" for layer in layers]
    return {
        "name": name,
        "class_name": class_name(name),
        "listed": f"{', '.join(layers[:-1])} and {layers[-1]}",
        "layers": repr(tuple(layers)).replace("'", '"'),
        "count": str(len(layers)),
        "before": ";  ".join(before),
        "after": f"%merged = linear(%x, %merged_proj_weight)\n             {';  '.join(pieces)}",
    }
