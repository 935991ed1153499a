"""The first call of a story in a fresh process with nothing but the artifacts: hits, the same results, or why not."""

from __future__ import annotations

import pytest
import torch

from graft.stages.revive import revive
from graft.stages.story import CacheLookup, CacheStage, FreshProcess, Story
from graft.stages.tell import tell_story
from graft.workbench.stages.fresh import FreshRun, difference
from graft.workbench.stages.targets import find_target
from graft.workbench.stages.text import story_lines

PROGRAM = """
import torch

class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(8))  # other ones in every process

    def forward(self, x):
        return torch.nn.functional.silu(x * self.w), x + 1

def Scaled_inputs():
    return [(torch.randn(4, 8),)]
"""


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    path = tmp_path_factory.mktemp("fresh") / "fresh_program.py"
    path.write_text(PROGRAM)
    return f"{path}:Scaled"


@pytest.mark.exhaustive  # the short run: test_testing_kit_compiled.py: test_cache_artifacts_make_the_round_trip
def test_artifacts_serve_a_fresh_process(scaled):
    found = find_target(scaled)
    story = tell_story(found.function, found.calls, elsewhere=FreshRun(scaled, [8]))
    fresh = story.caches.fresh
    assert fresh and (fresh.problem, fresh.differs) == ("", "") and fresh.bytes > 1000
    assert {(one.cache, one.outcome) for one in fresh.lookups} == {("fx_graph", "hit"), ("aotautograd", "hit")}
    assert {one.key for one in fresh.lookups} == {one.key for one in story.caches.lookups}
    told = "\n".join(line.text for line in story_lines(story, 7))
    assert f"fresh process with {fresh.bytes:,} bytes of artifacts: " in told and "the same results" in told


@pytest.mark.exhaustive
def test_what_is_part_of_the_key_is_missed(scaled):
    found = find_target(scaled)
    other = FreshRun(scaled, [8], options={"cpp.threads": 1})
    missed = tell_story(found.function, found.calls, whole=False, elsewhere=other).caches.fresh
    assert missed and {one.outcome for one in missed.lookups} == {"miss"} and missed.differs == ""


@pytest.mark.exhaustive
def test_a_process_that_fails_is_told(tmp_path):
    gone = FreshRun(str(tmp_path / "gone.py:f"), [8])
    found = gone(b"nothing", torch.sin, (torch.ones(2),), torch.ones(2))
    assert "ended with 1: " in found.problem and "gone.py" in found.problem and found.bytes == 7


def test_other_results_are_told():
    one = {"a": torch.ones(2), "b": [3, torch.zeros(1)]}
    assert difference({"a": torch.ones(2), "b": [3, torch.zeros(1)]}, one) == ""
    assert "result 2" in difference({"a": torch.ones(2), "b": [3, torch.ones(1)]}, one)
    assert "result 1" in difference({"a": torch.ones(2), "b": [4, torch.zeros(1)]}, one)
    assert "1 results in place of 3" in difference(torch.ones(2), one)


@pytest.mark.parametrize(
    ("fresh", "told"),
    [
        (FreshProcess(problem="it ended with 1: no word", bytes=5), "5 bytes of artifacts: it ended with 1: no word"),
        (FreshProcess((CacheLookup("0/0", "fx_graph", "miss"),), 1.5, 5), "fx_graph miss; 1.50 s, 2.50 s less"),
        (FreshProcess((), 1.0, 5, "result 0 has others"), "1.00 s, 3.00 s less than the first call; result 0"),
    ],
)  # fmt: skip
def test_what_a_fresh_process_found_is_one_line(fresh, told):
    story = Story("f", "inductor", "2.13.0", "cpu", caches=CacheStage(seconds=(4.0, 1.0), fresh=fresh))
    assert told in story_lines(story, 7)[-1].text
    assert revive(Story, story.to_dict()) == story
