"""`graft run`: answer prompts, and show what was done to the model."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graft.cli.documents import print_json
from graft.cli.generate.run_compare import ComparedModel, measure, show_comparison
from graft.cli.load import load_llm, sampling_params
from graft.cli.options import (
    DEFAULT_MODEL,
    Answers,
    Backend,
    CacheDtype,
    CacheMemory,
    ConfigFile,
    Device,
    DType,
    Frequency,
    Json,
    Logprobs,
    MaxModelLen,
    MinP,
    Nvtx,
    Plugins,
    Presence,
    Quantize,
    Recompile,
    Repetition,
    Seed,
    Sets,
    Stop,
    Temperature,
    TensorParallel,
    TopK,
    TopP,
    TrustRemoteCode,
    UseCache,
)

if TYPE_CHECKING:
    from graft.engine.core import Output
    from graft.engine.llm import LLM
    from graft.engine.params import SamplingParams
    from graft.workbench.compare.engine import EngineComparison

Compare = Annotated[
    bool,
    typer.Option(
        help="Also time Hugging Face eager and compare logits with float64, in the dtype of --dtype or in every one."
    ),
]
Dump = Annotated[str | None, typer.Option(help="Write graph dumps to this folder.", metavar="DIR")]
Verify = Annotated[bool, typer.Option(help="Check every match numerically: run it beside what it replaced.")]


def run(
    prompts: Annotated[list[str] | None, typer.Argument(help="What to complete; standard input if left out.")] = None,
    model: Annotated[str, typer.Option("--model", "-m", help="Registry name, folder or .gguf file.")] = DEFAULT_MODEL,
    max_tokens: Annotated[int, typer.Option(help="New tokens for each prompt.")] = 64,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    presence_penalty: Presence = 0.0,
    frequency_penalty: Frequency = 0.0,
    repetition_penalty: Repetition = 1.0,
    n: Answers = 1,
    logprobs: Logprobs = None,
    seed: Seed = None,
    stop: Stop = None,
    chat: Annotated[bool, typer.Option(help="Wrap the prompt in the model's chat template.")] = False,
    token_ids: Annotated[str | None, typer.Option(help="A prompt as token ids: 1,2,3.")] = None,
    compare: Compare = False,
    table: Annotated[bool, typer.Option(help="Print the pipeline table.")] = False,
    dtype: DType = "auto",
    device: Device = "auto",
    backend: Backend = "auto",
    config: ConfigFile = None,
    sets: Sets = None,
    plugins: Plugins = None,
    quantize: Quantize = None,
    verify: Verify = False,
    kv_cache_memory: CacheMemory = None,
    kv_cache_dtype: CacheDtype = "auto",
    max_model_len: MaxModelLen = None,
    tensor_parallel: TensorParallel = None,
    trust_remote_code: TrustRemoteCode = False,
    use_cache: UseCache = True,
    recompile: Recompile = False,
    nvtx: Nvtx = False,  # noqa: ARG001 (its callback does it)
    dump: Dump = None,
    as_json: Json = False,
) -> None:
    """Complete prompts with a model."""
    from graft.cli.show import progress_bar

    given, params = read_prompts(prompts, token_ids), sampling_params(
        stop, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, n=n,
        presence_penalty=presence_penalty, frequency_penalty=frequency_penalty, repetition_penalty=repetition_penalty,
        logprobs=logprobs,
    )  # fmt: skip
    with progress_bar() as progress:
        llm = load_llm(
            model, progress, dtype=dtype, device=device, config=config, sets=checked(sets, verify), plugins=plugins,
            backend=backend, dump_dir=dump, quantize=quantize, keep_weights=compare, kv_cache_memory=kv_cache_memory,
            kv_cache_dtype=kv_cache_dtype, max_model_len=max_model_len, trust_remote_code=trust_remote_code,
            use_cache=use_cache, recompile=recompile, tensor_parallel_size=tensor_parallel,
        )  # fmt: skip
        asked = [as_chat(llm, prompt) if chat else prompt for prompt in given]
        live = not as_json and len(asked) == n == 1 and logprobs is None and llm.tokenizer is not None
        outputs = [] if live else llm.generate(asked, params, progress=progress)
    if live:  # after the progress bar
        stream(llm, asked[0], params)
    request = ComparedModel(model, config, checked(sets, verify), plugins or (), quantize, trust_remote_code, dtype)
    speeds, found = measure(llm, answered(asked, outputs) if compare else [], request)
    show(llm, given, outputs, speeds, found, as_json=as_json, table=table, verify=verify)


def checked(sets: list[str] | None, verify: bool) -> list[str]:
    return [*(sets or ()), *(["verify=matches"] if verify else [])]


def answered(asked: list[Any], outputs: list[Output]) -> list[Any]:
    """The prompts without an error; one that was streamed has no output here."""
    return [prompt for prompt, output in zip(asked, outputs, strict=True) if not output.error] if outputs else asked


def show(
    llm: LLM,
    given: list[Any],
    outputs: list[Output],
    speeds: dict[str, float],
    found: EngineComparison | None,
    *,
    as_json: bool,
    table: bool,
    verify: bool,
) -> None:
    failed = any(output.error for output in outputs) or (found is not None and bool(found.failures))
    if as_json:
        show_json(llm, outputs, speeds, found)
        raise typer.Exit(int(failed))
    show_outputs(llm, given, outputs)
    if table:
        show_table(llm)
    elif verify:
        show_checks(llm)
    if found is not None:
        show_comparison(found)
    show_speeds(llm, speeds)
    raise typer.Exit(int(failed))


def show_outputs(llm: LLM, prompts: list[Any], outputs: list[Output]) -> None:
    from graft.cli.show import err, out

    for prompt, output in zip(prompts, outputs, strict=False):
        out.print(str(prompt), end="", markup=False, style="bold")
        if output.error is not None:
            err.print(f" → error: {output.error}", markup=False, soft_wrap=True)
            continue
        for index, each in enumerate((output, *output.alternatives)):
            if output.alternatives:
                out.print(f"\n[{index + 1}]", end="", markup=False, highlight=False)
            out.print(each.text if llm.tokenizer else f" → {each.token_ids}", markup=False)
            for line in logprob_lines(llm, each):
                out.print(line, markup=False, highlight=False, soft_wrap=True)


def logprob_lines(llm: LLM, output: Output) -> list[str]:
    """For each token its log probability and rank, then the likeliest."""

    def name(token: int) -> str:
        return f"{token} {llm.tokenizer.decode([token])!r}" if llm.tokenizer else str(token)

    lines = []
    for token, likely in zip(output.token_ids, output.logprobs or (), strict=False):
        others = [f"{name(other)} {p.logprob:.3f}" for other, p in likely.items() if other != token]
        told = f"  {name(token)} {likely[token].logprob:.3f}, rank {likely[token].rank}"
        lines.append(f"{told}{'; ' if others else ''}{', '.join(others)}")
    return lines


def read_prompts(prompts: list[str] | None, token_ids: str | None) -> list[Any]:
    from graft.base.errors import UsageError
    from graft.engine.prompts import as_text

    if token_ids is not None and prompts:
        raise UsageError("give a prompt or --token-ids, not both")
    if token_ids is not None:
        try:
            return [[int(part) for part in token_ids.split(",")]]
        except ValueError:
            raise UsageError(f"--token-ids takes numbers with commas between them, not {token_ids!r}") from None
    if prompts:
        return [as_text(prompt) for prompt in prompts]
    if sys.stdin.isatty():
        raise UsageError('give a prompt: graft run "The capital of France is"')
    return [as_text(sys.stdin.buffer.read()).rstrip("\n")]


def as_chat(llm: LLM, prompt: Any) -> Any:
    from graft.base.errors import UsageError

    if not isinstance(prompt, str):
        raise UsageError("--chat wraps a text, not token ids; leave out one of the two")
    return llm.chat_prompt([{"role": "user", "content": prompt}])


def stream(llm: LLM, prompt: Any, params: SamplingParams) -> None:
    """Prints the text as it comes; a request that is refused is so before anything is printed."""
    pieces = llm.stream(prompt, params)
    if isinstance(prompt, str):
        print(prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


def show_json(
    llm: LLM, outputs: list[Output], speeds: dict[str, float], found: EngineComparison | None = None
) -> None:
    document = {
        "model": llm.model.name,
        "outputs": [output.to_json() for output in outputs],
        "stats": asdict(llm.stats),
        "tokens_per_second": speeds,
        "backend": llm.backend,
        "comparison": None if found is None else found.to_dict(),
        "report": json.loads(llm.report.to_json()),
    }
    print_json("run", document)


def show_table(llm: LLM) -> None:
    from graft.cli.show import out, print_pipeline

    print_pipeline(llm.report)
    for op, kernel in llm.report.kernels.items():
        out.print(f"{op}: {kernel}", markup=False)


def show_checks(llm: LLM) -> None:
    """What the table would show of them: numeric checks of matches."""
    from graft.cli.show import check_text, out

    for record in llm.report.transforms.values():
        if record.matches:
            out.print(f"{record.name}: {check_text(record)}", markup=False, soft_wrap=True)


def show_speeds(llm: LLM, speeds: dict[str, float]) -> None:
    from graft.cli.show import out

    s, dtype = llm.stats, str(llm.model.module.dtype).removeprefix("torch.")
    if llm.quantized:
        dtype += f" with weights in {llm.quantized.format}"
    rates = [f"graft ({llm.backend}) {speeds['graft']:.1f} tokens/s"]
    if "hugging_face_eager" in speeds:
        baseline = speeds["hugging_face_eager"]
        rates.append(
            f"Hugging Face eager {baseline:.1f} tokens/s ({speeds['graft'] / baseline:.2f}x)" if baseline else ""
        )
    out.print(
        f"{llm.model.name}, {dtype}, {llm.device}: {s.prompt_tokens} prompt + {s.new_tokens} new tokens,"
        " decode: " + ", ".join(rates),
        markup=False,
    )
