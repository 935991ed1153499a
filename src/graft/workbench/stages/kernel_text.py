"""Stage 5 as lines for people: kernels with their times, and what autotuning chose from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from graft.stages.story import Story
from graft.stages.story_code import AutotuneRecord, KernelRecord
from graft.workbench.stages.words import FEW, MOST, cut, folded, plural, range_of, times_text


def kernel_lines(story: Story) -> list[str]:
    stage = story.kernels
    lines = cut(folded(kernel_line(kernel) for kernel in stage.kernels), 2 * MOST)
    lines += [line for one in (*stage.choices, *stage.configs) for line in autotune_lines(one)]
    lines += cut(folded(f"{one.graph} nothing to choose for {one.name}: {one.reason}" for one in stage.single))
    lines += [stage.autotuning] if stage.autotuning and stage.kernels else []
    lines += total_lines([kernel for kernel in stage.kernels if kernel.us])
    untimed = Counter(kernel.not_timed for kernel in stage.kernels if kernel.not_timed)
    lines += [f"not timed, {plural(times, 'kernel')}: {reason}" for reason, times in untimed.items()]
    return [*lines, *([stage.resources] if stage.resources and stage.kernels else [])]


def autotune_lines(one: AutotuneRecord) -> list[str]:
    """The fastest few of a call's choices or a kernel's configurations, each with its tiles."""
    told = []
    for name, ms in one.ms.items():
        facts = [one.tiles[name]] if name in one.tiles else []
        if name in one.registers:
            facts.append(f"{one.registers[name]} registers, {one.spills.get(name, 0)} spilled")
        told.append(f"  {ms:.4f} ms {name}" + (f" ({', '.join(facts)})" if facts else ""))
    failed = f", {one.failed} more cannot be used" if one.failed else ""  # they need too much, or spill registers
    return [f"{one.graph} autotuned {one.name}, {plural(len(told), 'choice')}{failed}:", *cut(told, FEW)]


def total_lines(timed: Sequence[KernelRecord]) -> list[str]:
    """Of all launches, and which kernel takes most; several where their readings overlap."""
    if not timed:
        return []
    sums = [
        sum(one.launches * at for one, at in zip(timed, side, strict=True))
        for side in zip(*map(range_of, timed), strict=True)
    ]
    slowest = max(timed, key=lambda one: one.us * one.launches)
    least = range_of(slowest)[0] * slowest.launches
    most = [one.name for one in timed if one is slowest or range_of(one)[1] * one.launches > least]
    total = times_text(sum(one.us * one.launches for one in timed), sums)
    which = most[0] if len(most) == 1 else f"{' or '.join(most[:3])}{' …' * (len(most) > 3)} (within noise)"
    launches = sum(one.launches for one in timed)
    if launches == 1:
        return []
    return [f"{total} in {launches} launches, each alone; most in {which}"]


def kernel_line(kernel: KernelRecord) -> str:
    launches = f", {kernel.launches} launches" if kernel.launches > 1 else ""
    launches += f" with {kernel.shapes} shapes" if kernel.shapes > 1 else ""
    of = f" of {lines_text(kernel)}" if kernel.lines else ""
    what = f"{kernel.graph} {kernel.language} {kernel.name}: {plural(len(kernel.nodes), 'node')}"
    tile = f", tile {kernel.tile}" if kernel.tile else ""
    return f"{what}{launches}{kernel_time(kernel)}{tile}{of}"


def lines_text(kernel: KernelRecord) -> str:
    return ", ".join(kernel.lines[:3]) + (" …" if len(kernel.lines) > 3 else "")


def kernel_time(kernel: KernelRecord) -> str:
    """`, 3.2 µs (2.9 to 4.1), 32 registers, 8 spilled`."""
    each = " each on average" if kernel.shapes > 1 else ""
    parts = [f"{times_text(kernel.us, kernel.us_range)}{each}"] if kernel.us else []
    if kernel.registers is not None:
        parts.append(f"{kernel.registers} registers, {kernel.spills or 0} spilled")
    return "".join(f", {part}" for part in parts)
