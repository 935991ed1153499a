"""Questions that people ask of torch.compile, each with an answer from a story."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from graft.base.errors import UsageError, near
from graft.stages.follow import Trail, follow, leaf_names
from graft.stages.story import CacheLookup, Refusal, Story
from graft.workbench.stages.text import called_from, values_told
from graft.workbench.stages.words import bytes_text

NO_KEY = re.compile(r"custom pass|call_function target", re.IGNORECASE)  # in the reason of a bypass
CALLS = ("ExternKernel", "FallbackKernel", "MultiOutput")  # kinds of IR that are calls, not loops


@dataclass(frozen=True)
class Answer:
    """answer: one line. details: what it rests on. advice: what to do, where there is something to do."""

    question: str
    answer: str
    details: tuple[str, ...] = ()
    advice: str = ""


def why_recompiled(story: Story) -> Answer:
    question, found = "why did it recompile?", story.dynamo.recompilations
    if not found:
        once = "it did not: every graph was compiled once" if story.dynamo.graphs else story.dynamo.problem
        return Answer(question, once, story.dynamo.notes)
    details = []
    for one in found:
        at, told = (f" ({one.line})" if one.line else ""), values_told(one)
        guard = f"{one.guard}: {told}" if told else one.guard
        details.append(f"{one.graph} because of {one.previous or 'an earlier graph'}: {guard}{at}")
    sizes = any("size mismatch" in one.guard for one in found)
    advice = (
        "free the size: --dynamic true, torch._dynamo.mark_dynamic(tensor, dim)"
        if sizes
        else "keep what varies in a tensor, or make it the same in every call"
    )
    again = len({one.graph for one in found})  # each tells the guard of every earlier graph
    times = "once" if again == 1 else f"{again} times"
    got, wanted = found[0].actual or "another value", found[0].expected
    first = f"{found[0].guard}, {got} where {wanted} was compiled" if wanted else found[0].guard
    return Answer(question, f"{times}; first: {first}", (*details, *story.dynamo.notes), advice)


def why_no_cudagraph(story: Story) -> Answer:
    question, found = "why was my CUDA graph skipped?", story.runtime.cudagraphs
    if not found:
        return Answer(question, story.runtime.problem or "nothing was compiled that could be recorded")
    skipped = [one for one in found if not one.recorded]
    details = tuple(f"{one.graph}: {'recorded' if one.recorded else one.reason}" for one in found)
    if not skipped:
        return Answer(question, f"it was not: {len(found)} recorded", details)
    return Answer(question, f"{len(skipped)} of {len(found)} skipped: {skipped[0].reason}", details)


def what_broke(story: Story) -> Answer:
    question, found = "what broke the graph?", story.dynamo.breaks
    if not found:
        answer = "nothing: one graph" if len(story.dynamo.graphs) == 1 else "nothing"
        return Answer(question, answer if story.dynamo.graphs else story.dynamo.problem or "nothing was compiled")
    details = [f"{one.line}: {one.explanation or one.reason}{called_from(one)}" for one in found]
    hints = tuple(dict.fromkeys(hint for one in found for hint in one.hints))
    times = "" if len(found) == 1 else f" ({len(found)} breaks)"
    return Answer(question, f"{found[0].line}: {found[0].reason}{times}", tuple(details), hints[0] if hints else "")


def which_kernel(story: Story, place: str) -> Answer:
    question = f"which kernel is {place} in?"
    trails = follow(story, place)
    names = dict.fromkeys(name for one in trails for name in one.kernels)
    details = tuple(line for one in trails for line in trail_lines(one))
    reasons = dict.fromkeys(one.gone for one in trails if one.gone)
    return Answer(question, ", ".join(names) or f"in none: {'; '.join(reasons)}", details)


def trail_lines(one: Trail) -> list[str]:
    names = (("dynamo", one.dynamo), ("functional", one.functional), ("post-grad", one.post_grad))
    lines = [f"{one.graph} {stop}: {', '.join(f'%{name}' for name in found)}" for stop, found in names if found]
    if one.scheduled:
        lines.append(f"{one.graph} scheduled: {', '.join(one.scheduled)} in {', '.join(one.groups)}")
    if one.kernels:
        lines.append(f"{one.graph} kernels: {', '.join(one.kernels)}")
    return [*lines, *([f"{one.graph} {one.gone}"] if one.gone else [])]


def what_copied(story: Story) -> Answer:
    question, found = "what did Inductor copy?", story.scheduling.copies
    if not found:
        return Answer(question, story.scheduling.problem or "nothing")
    known = sum(one.bytes for one in found if isinstance(one.bytes, int))
    sizes = [bytes_text(known)] if known or all(isinstance(one.bytes, int) for one in found) else []
    sizes += [bytes_text(one.bytes) for one in found if not isinstance(one.bytes, int)]
    details = []
    for one in found:
        where = f" in {one.kernel}" if one.kernel else ""
        details.append(f"{one.graph} %{one.node} {one.line}: {bytes_text(one.bytes)}{where}: {one.reason}")
    count = "1 copy" if len(found) == 1 else f"{len(found)} copies"
    return Answer(question, f"{count}, {' and '.join(sizes)}", tuple(details))


def why_not_fused(story: Story, first: str, second: str) -> Answer:
    question = f"why did {first} and {second} not fuse?"
    if first.removeprefix("%") == second.removeprefix("%"):
        raise UsageError(f"{first} is one place; name two")
    here, there = follow(story, first), follow(story, second)
    pairs = [(one, two) for one in here for two in there if one.graph == two.graph]
    if not pairs:
        return Answer(question, f"they are in different graphs: {here[0].graph} and {there[0].graph}")
    for one, two in pairs:
        if shared := set(one.groups) & set(two.groups):
            return Answer(question, f"they did: both are in {', '.join(sorted(shared))}", tuple(trail_lines(one)))
        if one.gone or two.gone:
            return Answer(question, f"{first if one.gone else second}: {one.gone or two.gone}")
    one, two = pairs[0]
    found = [refusal for refusal in story.scheduling.refusals if is_between(refusal, one, two)]
    if not found:
        return Answer(question, never_compared(story, one, two), (*trail_lines(one), *trail_lines(two)))
    details = [f"{r.first} and {r.second}: {r.reason}" for r in found]
    if shared := [name for name in one.kernels if name in two.kernels]:
        details.append(f"both are in {', '.join(shared)} all the same, as loops of their own")
    return Answer(question, " / ".join(dict.fromkeys(r.reason for r in found)), tuple(details))


def never_compared(story: Story, *trails: Trail) -> str:
    for one in trails:
        for node in story.scheduling.nodes:
            if node.graph == one.graph and node.name in one.scheduled and node.kind.startswith(CALLS):
                return f"{one.asked} is a call ({node.kind}), which the scheduler does not fuse with loops"
    return "the scheduler never compared them: it compares nodes that use a buffer in common"


def is_between(refusal: Refusal, one: Trail, two: Trail) -> bool:
    left, right = set(leaf_names(refusal.first)), set(leaf_names(refusal.second))
    mine, other = set(one.scheduled), set(two.scheduled)
    return refusal.graph == one.graph and bool((left & mine and right & other) or (left & other and right & mine))


def why_missed(story: Story, since: Story | None = None) -> Answer:
    """since: an earlier story, to whose keys those of this one are compared."""
    question, stage = "why was the cache missed?", story.caches
    left_out = [one for one in (*stage.lookups, *stage.again) if one.outcome == "bypass"]
    if stage.problem:
        return Answer(question, stage.problem)
    if left_out:
        reasons = tuple(dict.fromkeys(f"{one.graph} {one.cache}: {one.reason}" for one in left_out))
        no_key = any(NO_KEY.search(one.reason) and "higher_order" not in one.reason for one in left_out)
        advice = "give what has no key one: a CustomGraphPass with a uuid, a registered op" if no_key else ""
        return Answer(question, f"it was bypassed: {left_out[0].reason}", reasons, advice)
    earlier = since.caches.lookups if since is not None else ()
    differences = tuple(line for one in stage.lookups for line in key_difference(one, stage.lookups, earlier))
    again = [one.outcome for one in stage.again]
    works = "the same call again is a hit" if again and set(again) == {"hit"} else "the same call again misses, too"
    if since is not None:
        answer = differences[0] if differences else "it would not be: the keys are those of the earlier run"
        return Answer(question, answer, differences)
    answer = f"it was empty, as every story begins; {works}" if again else "it was empty, as every story begins"
    return Answer(
        question, answer, differences, "graft stages ask cache TARGET --since DIR compares with an earlier run"
    )


def key_difference(one: CacheLookup, own: Sequence[CacheLookup], earlier: Sequence[CacheLookup]) -> list[str]:
    """What in the key of `one` is not in the nearest other key: of an earlier run, else of an earlier graph."""
    others = [e for e in earlier if e.cache == one.cache and e.components]
    before = [o for o in own[: own.index(one)] if o.cache == one.cache and o.components]
    if not one.components or not (others or before) or any(o.key == one.key for o in others):
        return []
    nearest = min(others or before, key=lambda other: len(changed(one, other)))
    names = changed(one, nearest)
    what = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return [
        f"{one.graph} {one.cache}: its key differs from that of {nearest.graph} in {what or 'nothing that is told'}"
    ]


def changed(one: CacheLookup, other: CacheLookup) -> list[str]:
    names = dict.fromkeys((*one.components, *other.components))
    return [n for n in names if digest(one.components.get(n)) != digest(other.components.get(n))]


def digest(component: str | None) -> str:
    return (component or "").partition(" ")[0]


def with_end(answer: Answer, story: Story) -> Answer:
    """Of a story that ended early the answer holds for what came before its end, which is told first."""
    if story.end is None:
        return answer
    known = f"{answer.answer}; but it " if answer.details or answer.advice else "it "
    return replace(answer, answer=f"{known}{story.end}")


@dataclass(frozen=True)
class Question:
    """words: what it is asked about, beside the story."""

    text: str
    ask: Callable[..., Answer]
    words: tuple[str, ...] = ()


QUESTIONS = {
    "recompiles": Question("why did it recompile?", why_recompiled),
    "cudagraph": Question("why was my CUDA graph skipped?", why_no_cudagraph),
    "breaks": Question("what broke the graph?", what_broke),
    "kernel": Question("which kernel is this line in?", which_kernel, ("NODE|LINE",)),
    "copies": Question("what did Inductor copy?", what_copied),
    "fusion": Question("why did these two not fuse?", why_not_fused, ("NODE|LINE", "NODE|LINE")),
    "cache": Question("why was the cache missed?", why_missed),
}


def find_question(name: str, words: Sequence[str]) -> Question:
    if name not in QUESTIONS:
        raise UsageError(f"there is no question {name!r}{near(name, QUESTIONS)}")
    question = QUESTIONS[name]
    if len(words) != len(question.words):
        needs = " ".join(question.words) or "nothing more"
        raise UsageError(f"graft stages ask {name} TARGET takes {needs}, and was given {len(words)} words")
    return question
