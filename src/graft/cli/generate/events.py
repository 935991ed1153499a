"""`graft events`: what happens in the key-value cache while prompts are answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from graft.cli.documents import print_json
from graft.cli.load import load_llm
from graft.cli.options import DEFAULT_MODEL, CacheMemory, Device, DType, Model, TrustRemoteCode, UseCache

if TYPE_CHECKING:
    from graft.engine.kv.events import Event

PREFIX = "A paged key-value cache keeps the keys and values of earlier tokens in blocks of a fixed size. "
PROMPTS = (PREFIX + "Two prompts that begin alike", PREFIX + "The second request")


def events(
    model: Model = DEFAULT_MODEL,
    prompts: Annotated[
        list[str] | None,
        typer.Option("--prompt", help="Answered one after another. Repeatable; two that begin alike if left out."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="New tokens for each prompt.")] = 20,
    dtype: DType = "auto",
    device: Device = "auto",
    kv_cache_memory: CacheMemory = None,
    trust_remote_code: TrustRemoteCode = False,
    use_cache: UseCache = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, and nothing else.")] = False,
) -> None:
    """Answer prompts and print the life cycle of the cache's blocks, as a table or (--json) as JSON lines."""
    from graft.cli.show import out, progress_bar
    from graft.engine.params import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    told: list[tuple[str, Event]] = []
    with progress_bar() as progress:
        llm = load_llm(
            model, progress, dtype=dtype, device=device, kv_cache_memory=kv_cache_memory,
            trust_remote_code=trust_remote_code, use_cache=use_cache,
        )  # fmt: skip
        told += [("start", event) for event in llm.kv_cache_events()]
        given: list[Any] = list(prompts or PROMPTS)
        if llm.tokenizer is None and prompts is None:
            vocabulary = llm.model.module.config.vocab_size
            shared = [3 + i % (vocabulary - 3) for i in range(40)]  # two and a half blocks
            given = [[*shared, 5, 6], [*shared, 7]]
        for number, prompt in enumerate(given, 1):
            progress(f"prompt {number}", number - 1, len(given))
            (output,) = llm.generate([prompt], params)
            label = f"prompt {number}: {output.cached_tokens} of {len(llm.encode(prompt))} tokens from the cache"
            told += [(label, event) for event in llm.kv_cache_events()]
    if as_json:
        for _, event in told:
            print_json("events", event.to_json())
    else:
        out.print(life_cycle(told, llm.tokenizer))


def life_cycle(told: list[tuple[str, Event]], tokenizer: Any) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Life of the key-value cache", title_justify="left")
    for name in ("id", "event"):
        table.add_column(name, no_wrap=True)
    table.add_column("blocks")
    before = ""
    for label, event in told:
        if label != before:
            table.add_section()
            table.add_row("", "", Text(label, style="bold"))
            before = label
        table.add_row(str(event.event_id), type(event).__name__.lower(), Text(describe(event, tokenizer)))
    return table


def describe(event: Event, tokenizer: Any) -> str:
    from graft.engine.kv.events import Stored

    if not isinstance(event, Stored):
        return event.describe()
    return "\n".join([event.describe(), *(f"{b.hash[:8]}  {shown(b.tokens, tokenizer)}" for b in event.blocks)])


def shown(tokens: tuple[int, ...], tokenizer: Any) -> str:
    return repr(tokenizer.decode(list(tokens))) if tokenizer is not None else " ".join(map(str, tokens))
