"""What one transform does to a model's graph: the nodes that went, those that came, and who reads others now.

python examples/transform_before_after.py --transform fuse_rms_norm [--model tiny-llama] [--all]
python examples/transform_before_after.py --transform fix_functionalization     # on Inductor's graph

The same as `graft dump MODEL -o DIR` and `graft diff DIR --transform T`, as a program of three calls.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import graft
from graft.passes.config import load_config
from graft.workbench.diff_text import graph_lines, summary
from graft.workbench.dump import dump_model


def before_after(model: str, transform: str, folder: Path, *, unfold: bool = False) -> list[str]:
    """The lines of the difference. The graphs of every step stay in `folder`."""
    on_inductor = load_config().transforms[transform].stage == "inductor"
    dump_model(model, folder, load_config(), inductor=on_inductor)
    run = graft.open_run(folder / "inductor" / "graph_0" if on_inductor else folder)
    before, after = run.around(transform)
    difference = graft.diff_graphs(before.graph().graph, after.graph().graph)
    lines = [line.text for line in graph_lines(difference, unfold=unfold)]
    return [f"{transform} on {model}: {summary(difference)}", *lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--transform", required=True)
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--all", action="store_true", help="every layer, equal ones too")
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        print("\n".join(before_after(given.model, given.transform, Path(folder), unfold=given.all)))


if __name__ == "__main__":
    main()
