"""The thread team: barriers, chunks handed out once, reuse, more threads than cores, and an end without a hang."""

from __future__ import annotations

import numpy as np
import pytest
from native_build import compiled, every_target

SOURCE = """
#include <vector>
#include "team.h"
using namespace graft;

// After every barrier all threads must have counted this round; numbers: threads, rounds. array 0: faults.
struct Rounds { std::vector<int64_t> counts; int64_t rounds; std::atomic<int64_t> faults{0}; bool skip; };
extern "C" void barriers(void** arrays, const int64_t* number) {
  const int threads = int(number[0]);
  Rounds r;
  r.counts.resize(8 * threads), r.rounds = number[1], r.skip = number[2] != 0;
  Team team(threads);
  team.run([](void* arg, Team& all, int thread) {
    Rounds& r = *static_cast<Rounds*>(arg);
    for (int64_t round = 1; round <= r.rounds; round++) {
      r.counts[8 * thread] = round;
      if (!(r.skip && thread == 1)) all.barrier();
      for (int other = 0; other < all.threads; other++) r.faults += r.counts[8 * other] != round;
      if (!(r.skip && thread == 1)) all.barrier();
    }
    if (r.skip && thread == 1) for (int64_t round = 0; round < 2 * r.rounds; round++) all.barrier();
  }, &r);
  *static_cast<int64_t*>(arrays[0]) = r.faults;
}

// numbers: threads, rounds, chunks. array 0: how often each chunk was taken.
struct Chunks { std::vector<std::atomic<int64_t>> next; int64_t chunks; int64_t* taken; };
extern "C" void chunks(void** arrays, const int64_t* number) {
  Chunks c{std::vector<std::atomic<int64_t>>(number[1]), number[2], static_cast<int64_t*>(arrays[0])};
  Team team{int(number[0])};
  team.run([](void* arg, Team& all, int) {
    Chunks& c = *static_cast<Chunks*>(arg);
    for (auto& next : c.next) {
      share(next, c.chunks, [&](int64_t chunk) { c.taken[chunk]++; });  // not atomic: nobody else may have this chunk
      all.barrier();
    }
  }, &c);
}

// Several callers use one team, one after another; numbers: threads, callers, runs. array 0: runs of each thread.
struct Runs { std::vector<int64_t> seen; };
extern "C" void callers(void** arrays, const int64_t* number) {
  const int threads = int(number[0]);
  Runs r{std::vector<int64_t>(8 * threads)};
  {
    Team team(threads);
    std::vector<std::thread> all;
    for (int64_t i = 0; i < number[1]; i++)
      all.emplace_back([&] {
        for (int64_t n = 0; n < number[2]; n++)
          team.run([](void* arg, Team& t, int thread) {
            static_cast<Runs*>(arg)->seen[8 * thread]++;
            t.barrier();
          }, &r);
      });
    for (auto& thread : all) thread.join();
  }
  for (int i = 0; i < threads; i++) static_cast<int64_t*>(arrays[0])[i] = r.seen[8 * i];
}

// Teams that are made and go away, some without a run and some after all have gone to sleep; numbers: threads, teams.
extern "C" void ends(void** arrays, const int64_t* number) {
  int64_t& done = *static_cast<int64_t*>(arrays[0]);
  for (int64_t i = 0; i < number[1]; i++) {
    Team team{int(number[0])};
    std::atomic<int64_t> ran{0};
    if (i % 3) team.run([](void* arg, Team&, int) { ++*static_cast<std::atomic<int64_t>*>(arg); }, &ran);
    if (i % 8 == 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (i % 8 == 1) team.run([](void* arg, Team&, int) { ++*static_cast<std::atomic<int64_t>*>(arg); }, &ran);
    done += ran == team.threads * ((i % 3 != 0) + (i % 8 == 1));
  }
}

// One thread is late at every barrier, by more than the others spin; numbers: threads, rounds, µs. array 0: faults.
struct Late { std::atomic<int64_t> arrived{0}, faults{0}; int64_t rounds, wait; };
extern "C" void late(void** arrays, const int64_t* number) {
  Late l;
  l.rounds = number[1], l.wait = number[2];
  Team team{int(number[0])};
  team.run([](void* arg, Team& all, int thread) {
    Late& l = *static_cast<Late*>(arg);
    for (int64_t round = 1; round <= l.rounds; round++) {
      if (thread == round % all.threads) std::this_thread::sleep_for(std::chrono::microseconds(l.wait));
      l.arrived++;
      all.barrier();
      l.faults += l.arrived != round * all.threads;
      all.barrier();
    }
  }, &l);
  *static_cast<int64_t*>(arrays[0]) = l.faults;
}
"""
ENTRIES = ("barriers", "chunks", "callers", "ends", "late")
TEAMS = [p for p in every_target() if p.id in ("portable", "none")]  # a team has no vectors


def call(target, entry: str, size: int, *numbers: int) -> list[int]:
    found = np.zeros(size, np.int64)
    compiled(SOURCE, ENTRIES, target).call(entry, [found], list(numbers))
    return found.tolist()


@pytest.mark.parametrize("target", TEAMS)
@pytest.mark.parametrize(("threads", "rounds"), [(1, 5000), (2, 5000), (3, 1500), (8, 500)])
def test_a_barrier_waits_for_all_r22(target, threads, rounds):
    assert call(target, "barriers", 1, threads, rounds, 0) == [0]


@pytest.mark.parametrize("target", TEAMS)
def test_a_thread_that_skips_the_barrier_is_noticed_r22(target):
    assert call(target, "barriers", 1, 3, 200, 1)[0] > 0


@pytest.mark.parametrize("target", TEAMS)
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("chunks", [0, 1, 7, 1000])
def test_every_chunk_goes_to_one_thread_r22(target, threads, chunks):
    rounds = 300 if threads < 8 else 60
    assert call(target, "chunks", max(chunks, 1), threads, rounds, chunks) == [rounds] * chunks + [0] * (chunks == 0)


@pytest.mark.parametrize("target", TEAMS)
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_callers_take_turns_r22(target, threads):
    assert call(target, "callers", threads, threads, 4, 100) == [400] * threads


@pytest.mark.parametrize("target", TEAMS)
@pytest.mark.parametrize("threads", [1, 2, 8])
def test_a_team_ends_r22(target, threads):
    assert call(target, "ends", 1, threads, 60) == [60]


@pytest.mark.parametrize("target", TEAMS)
@pytest.mark.parametrize("threads", [2, 3, 8])
def test_a_late_thread_wakes_the_sleepers_r22(target, threads):
    assert call(target, "late", 1, threads, 200, 300) == [0]
