"""Options that several verbs share."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on standard output.")]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Change one value: transforms.fuse_rope.enabled=false. Repeatable.", metavar="KEY=VALUE"
    ),
]
ConfigFile = Annotated[
    str | None, typer.Option("--config", help="A YAML file laid over the defaults.", metavar="FILE")
]
Plugins = Annotated[
    list[str] | None, typer.Option("--plugin", help="A Python module that registers transforms. Repeatable.")
]
DType = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or float64.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
DEFAULT_MODEL = "smollm2-135m"
