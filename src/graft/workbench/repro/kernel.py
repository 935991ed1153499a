"""One generated kernel of a story as a file that runs by itself and says how long the kernel takes."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from string import Template
from typing import Any

from graft.base.errors import ReproRefused, UsageError, near
from graft.stages.kernels import dotted
from graft.stages.story import Story
from graft.stages.story_code import KernelRecord

TEMPLATE = Path(__file__).with_name("kernel_file.txt")
TENSOR = re.compile(r"(\w+)\[([^\]]*)\] (\([^)]*\)) (\S+)")
LIMIT = 600.0  # seconds for a kernel to be compiled and timed


def find_kernel(story: Story, name: str) -> KernelRecord:
    """`cpp_fused_silu_0`, or `0/1:cpp_fused_silu_0` where graphs have kernels of one name."""
    graph, _, short = name.rpartition(":")
    found = [k for k in story.kernels.kernels if k.name == short and graph in ("", k.graph)]
    if not found:
        raise UsageError(f"no kernel of {story.target} is named {name!r}{near(short, kernel_names(story))}")
    if len(found) > 1:
        known = " or ".join(f"{k.graph}:{k.name}" for k in found)
        raise UsageError(f"{name} is in {len(found)} graphs; write {known}")
    return found[0]


def kernel_names(story: Story) -> list[str]:
    return [kernel.name for kernel in story.kernels.kernels]


def kernel_source(story: Story, kernel: KernelRecord, command: str) -> str:
    """The whole file."""
    code = story.kernels.code.get(kernel.graph, "")
    if not code or not kernel.arguments:
        why = kernel.not_timed or "it was not launched in the first call"
        raise ReproRefused(f"{kernel.name} has no known arguments: {why}")
    placed = [text for text in kernel.arguments if not re.match(r"[a-z_]\w*=", text)]
    named = [text.partition("=") for text in kernel.arguments if re.match(r"[a-z_]\w*=", text)]
    made = [f"    {argument(text, kernel)},  # {text}" for text in placed]
    nodes = ", ".join(f"%{node}" for node in kernel.nodes[:12]) + (" …" if len(kernel.nodes) > 12 else "")
    return Template(TEMPLATE.read_text()).substitute(
        title=f"{kernel.name} of {story.target}, graph {kernel.graph}, alone.",
        command=command,
        version=story.torch,
        about=f"It computes {nodes} of {', '.join(kernel.lines)}." if kernel.lines else "",
        code=module_code(code, kernel),
        arguments="\n".join(made),
        named=", ".join(f"{key!r}: {argument(text, kernel)}" for key, _, text in named),
        call=call_text(kernel),
        name=repr(kernel.name),
    )


def argument(text: str, kernel: KernelRecord) -> str:
    """The code that makes an argument up: of the recorded shape, strides, dtype and device, or the value itself."""
    if found := TENSOR.fullmatch(text):
        dtype, shape, stride, device = found.groups()
        return f'tensor({tuple_text(shape)}, {stride}, torch.{dtype}, "{device}")'
    if text.startswith("torch."):
        return text
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise ReproRefused(f"{kernel.name} takes a {text}, which cannot be made up") from None
    return text


def tuple_text(sizes: str) -> str:
    return f"({sizes},)" if sizes else "()"


def call_text(kernel: KernelRecord) -> str:
    if kernel.language == "triton":
        run = f"{kernel.name}.run(*ARGUMENTS, **NAMED, stream=torch.cuda.current_stream().cuda_stream)"
        return f"    return {run}"
    return f"    return {kernel.name}(*ARGUMENTS, **NAMED)"


def module_code(code: str, kernel: KernelRecord) -> str:
    """What stands above the function that calls the kernels: imports, names, and of the kernels this one."""
    kept = []
    for statement in ast.parse(code).body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            break
        if is_kernel(statement) and not names_it(statement, kernel.name):
            continue
        if isinstance(statement, (ast.Import, ast.ImportFrom, ast.Assign)):
            kept.append(ast.get_source_segment(code, statement) or "")
    kept += ["import graft.ops"] if kernel.name.startswith("torch.ops.graft") else []
    kept += ["async_compile.wait(globals())"] if kernel.source else []
    return "\n".join(kept)


def is_kernel(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Call)
        and dotted(statement.value.func).startswith("async_compile.")
    )


def names_it(statement: Any, name: str) -> bool:
    return isinstance(statement.targets[0], ast.Name) and statement.targets[0].id == name


def time_file(path: Path) -> dict[str, Any]:
    """Runs the file in a process of its own: `us`, `least_us`, `most_us`, `calls`, `bytes`."""
    try:
        done = subprocess.run(
            [sys.executable, str(path), "--json"], capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        raise ReproRefused(f"{path} did not end within {LIMIT:.0f} s") from None
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or ["it said nothing"]
    if done.returncode:
        raise ReproRefused(f"{path} ended with {done.returncode}: {lines[-1]}")
    return json.loads(lines[-1])
