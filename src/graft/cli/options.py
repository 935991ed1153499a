"""Options that several verbs share."""

from __future__ import annotations

from typing import Annotated

import typer


def start_nvtx(asked: bool) -> bool:
    if asked:
        from graft.backends.nvtx import switch_on
        from graft.base.errors import UsageError

        try:
            switch_on()
        except UsageError as error:
            raise typer.BadParameter(str(error)) from error
    return asked


Nvtx = Annotated[
    bool, typer.Option("--nvtx", help="NVTX ranges by layer, transform and op, for nsys.", callback=start_nvtx)
]
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
    list[str] | None,
    typer.Option("--plugin", help="A Python module or .py file that registers transforms. Repeatable."),
]
DType = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or float64.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Backend = Annotated[str, typer.Option(help="auto, eager, inductor, cuda_graph or native.")]
Model = Annotated[str, typer.Argument(help="Registry name, folder or .gguf file.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Sample among the likeliest tokens that make up this share.")]
TopK = Annotated[int, typer.Option(help="Sample among this many of the likeliest tokens; 0 is all.")]
MinP = Annotated[float, typer.Option(help="Leave out tokens less likely than this share of the likeliest; 0 is off.")]
Presence = Annotated[float, typer.Option("--presence-penalty", help="Off logits of tokens that came; -2 to 2.")]
Frequency = Annotated[
    float, typer.Option("--frequency-penalty", help="Off logits, for each time that a token came; -2 to 2.")
]
Repetition = Annotated[
    float, typer.Option("--repetition-penalty", help="Divides logits of tokens that came, prompt included; 1 is off.")
]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Tokens of a prompt and its answer. The model's own context if left out.")
]
Answers = Annotated[int, typer.Option(help="Answers to each prompt; more than one need a temperature.")]
Logprobs = Annotated[
    int | None, typer.Option(help="Show how likely each token was, beside so many of the likeliest.", metavar="K")
]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the text before this string. Repeatable.")]
CacheMemory = Annotated[
    str | None, typer.Option(help="Size of the key-value cache: 2GiB. From free memory if left out.", metavar="SIZE")
]
OffloadingSize = Annotated[
    str | None,
    typer.Option(
        help="Host memory for blocks that the cache has no room for: 32GiB. They are forgotten if left out.",
        metavar="SIZE",
    ),
]
CacheDtype = Annotated[
    str,
    typer.Option(
        help="Keys and values in the cache: auto (the model's dtype) or fp8, half of the bytes of 16 bits.",
        metavar="auto|fp8",
    ),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        help="Weights of linear layers as int8, int4 or fp8; none: floats, where native keeps a GGUF file's own.",
        metavar="FORMAT",
    ),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let Python code that comes with the model's folder run.")
]
UseCache = Annotated[
    bool,
    typer.Option("--cache/--no-cache", help="Start from the engine that an earlier start kept, and keep this one."),
]
Recompile = Annotated[
    bool,
    typer.Option(
        "--recompile", help="A compiled engine for another graft, torch or machine is compiled anew in place."
    ),
]
TensorParallel = Annotated[
    int | None,
    typer.Option(
        "--tensor-parallel",
        help="So many processes compute the model together, each with its part of the weights and the cache."
        " [1, or those that an engine was compiled for]",
        metavar="N",
    ),
]
DEFAULT_MODEL = "smollm2-135m"


def read_numbers(name: str, text: str) -> tuple[int, ...]:
    from graft.base.errors import UsageError

    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise UsageError(f"--{name} takes numbers with commas between them, not {text!r}") from None
