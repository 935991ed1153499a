"""The thread team: barriers, chunks handed out once, reuse, more threads than cores, and an end without a hang."""

from __future__ import annotations

import numpy as np
import pytest

from native_build import compiled, every_target

SOURCE = """
#include <vector>
#include "team.h"
using namespace graft;

// A chunk of a round must find all chunks of the round before done; numbers: threads, rounds, chunks, µs that chunks
// take now and then, whether the barriers are left out. array 0: faults.
struct Rounds {
  std::vector<std::atomic<int64_t>> next, cells;
  int64_t rounds, chunks, wait;
  bool skip;
  std::atomic<int64_t> faults{0};
};
extern "C" void barriers(void** arrays, const int64_t* number) {
  Rounds r{std::vector<std::atomic<int64_t>>(number[1]), std::vector<std::atomic<int64_t>>(2 * number[2]), number[1],
           number[2], number[3], number[4] != 0, {}};
  Team team{int(number[0])};
  team.run([](void* arg, Team& all, int) {
    Rounds& r = *static_cast<Rounds*>(arg);
    for (int64_t round = 0; round < r.rounds; round++) {
      share(r.next[round], r.chunks, [&](int64_t chunk) {
        const int64_t now = (round & 1) * r.chunks, before = r.chunks - now;
        for (int64_t i = 0; i < r.chunks; i++) r.faults += r.cells[before + i] != round;
        if (r.wait && (round + chunk) % 7 == 0) std::this_thread::sleep_for(std::chrono::microseconds(r.wait));
        r.cells[now + chunk] = round + 1;
      });
      if (!r.skip) all.barrier();
    }
  }, &r);
  for (int64_t i = 0; i < r.chunks; i++) r.faults += r.cells[((r.rounds - 1) & 1) * r.chunks + i] != r.rounds;
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

// Several callers use one team, one after another; numbers: threads, callers, runs. array 0: chunks, bad threads.
struct Runs {
  std::vector<std::atomic<int64_t>> next;
  std::atomic<int64_t> done{0}, wrong{0};
};
extern "C" void callers(void** arrays, const int64_t* number) {
  std::atomic<int64_t> done{0}, wrong{0};
  {
    Team team{int(number[0])};
    std::vector<std::thread> all;
    for (int64_t i = 0; i < number[1]; i++)
      all.emplace_back([&] {
        for (int64_t n = 0; n < number[2]; n++) {
          Runs r{std::vector<std::atomic<int64_t>>(3), {}, {}};  // on this thread's stack: gone after the run
          team.run([](void* arg, Team& t, int thread) {
            Runs& r = *static_cast<Runs*>(arg);
            r.wrong += thread < 0 || thread >= t.threads;
            for (auto& next : r.next) share(next, 5, [&](int64_t) { r.done++; }), t.barrier();
          }, &r);
          done += r.done, wrong += r.wrong;
        }
      });
    for (auto& thread : all) thread.join();
  }
  static_cast<int64_t*>(arrays[0])[0] = done, static_cast<int64_t*>(arrays[0])[1] = wrong;
}

// Teams that are made and go away, some without a run and some after all have gone to sleep; numbers: threads, teams.
struct One { std::atomic<int64_t> next{0}, done{0}; };
extern "C" void ends(void** arrays, const int64_t* number) {
  int64_t& right = *static_cast<int64_t*>(arrays[0]);
  const auto work = [](void* arg, Team&, int) {
    One& one = *static_cast<One*>(arg);
    share(one.next, 9, [&](int64_t) { one.done++; });
  };
  for (int64_t i = 0; i < number[1]; i++) {
    Team team{int(number[0])};
    One first, second;
    if (i % 3) team.run(work, &first);
    if (i % 8 == 1) std::this_thread::sleep_for(std::chrono::milliseconds(1)), team.run(work, &second);
    right += first.done == (i % 3 ? 9 : 0) && second.done == (i % 8 == 1 ? 9 : 0);
  }
}

// Whoever gets chunk 0 of a round stops in it, as a thread does that has lost its core, until all other chunks
// of the round are done. numbers: threads, rounds, chunks, ms until it gives up, whether chunks are split beforehand
// instead of handed out. array 0: rounds in which it gave up; chunks done.
struct Blocked {
  std::vector<std::atomic<int64_t>> next, done;
  int64_t chunks, patience;
  bool split;
  std::atomic<int64_t> given_up{0};
};
extern "C" void blocked(void** arrays, const int64_t* number) {
  Blocked b{std::vector<std::atomic<int64_t>>(number[1]), std::vector<std::atomic<int64_t>>(number[1]), number[2],
            number[3], number[4] != 0, {}};
  Team team{int(number[0])};
  team.run([](void* arg, Team& all, int thread) {
    Blocked& b = *static_cast<Blocked*>(arg);
    for (size_t round = 0; round < b.next.size(); round++) {
      const auto work = [&](int64_t chunk) {
        const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(b.patience);
        while (chunk == 0 && b.done[round] < b.chunks - 1) {
          std::this_thread::sleep_for(std::chrono::microseconds(100));
          if (std::chrono::steady_clock::now() > end) { b.given_up++; break; }
        }
        b.done[round]++;
      };
      if (b.split)
        for (int64_t chunk = thread; chunk < b.chunks; chunk += all.threads) work(chunk);
      else
        share(b.next[round], b.chunks, work);
      all.barrier();
    }
  }, &b);
  int64_t* found = static_cast<int64_t*>(arrays[0]);
  found[0] = b.given_up;
  for (auto& done : b.done) found[1] += done;
}
"""
ENTRIES = ("barriers", "chunks", "callers", "ends", "blocked")
TEAMS = [p for p in every_target() if p.id in ("portable", "none")]  # a team has no vectors


def call(target, entry: str, size: int, *numbers: int) -> list[int]:
    found = np.zeros(size, np.int64)
    compiled(SOURCE, ENTRIES, target).call(entry, [found], list(numbers))
    return found.tolist()


@pytest.mark.parametrize("target", TEAMS)
@pytest.mark.parametrize(("threads", "rounds"), [(1, 5000), (2, 5000), (3, 2000), (8, 1000)])
@pytest.mark.parametrize("chunks", [1, 5, 24])
def test_a_barrier_waits_for_the_work(target, threads, rounds, chunks):
    assert call(target, "barriers", 1, threads, rounds, chunks, 0, 0) == [0]


@pytest.mark.parametrize("target", TEAMS)
@pytest.mark.parametrize("threads", [2, 3, 8])
def test_a_late_chunk_is_waited_for_asleep(target, threads):
    assert call(target, "barriers", 1, threads, 150, 10, 200, 0) == [0]


@pytest.mark.parametrize("target", TEAMS)
def test_a_missing_barrier_is_noticed(target):
    assert call(target, "barriers", 1, 3, 200, 10, 200, 1)[0] > 0


@pytest.mark.parametrize("target", TEAMS)
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("chunks", [0, 1, 7, 1000])
def test_every_chunk_goes_to_one_thread(target, threads, chunks):
    rounds = 300 if threads < 8 else 60
    assert call(target, "chunks", max(chunks, 1), threads, rounds, chunks) == [rounds] * chunks + [0] * (chunks == 0)


@pytest.mark.parametrize("target", TEAMS)
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_callers_take_turns(target, threads):
    assert call(target, "callers", 2, threads, 4, 200) == [4 * 200 * 15, 0]


@pytest.mark.parametrize("target", TEAMS)
@pytest.mark.parametrize("threads", [1, 2, 8])
def test_a_team_ends(target, threads):
    assert call(target, "ends", 1, threads, 60) == [60]


@pytest.mark.parametrize("target", TEAMS)
@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("chunks", [1, 2, 100])
def test_a_thread_that_stops_in_a_chunk_leaves_the_others_to_the_rest(target, threads, chunks):
    """It waits for all other chunks of the round; 60 s of patience are there to end a test that would hang."""
    rounds = 20
    assert call(target, "blocked", 2, threads, rounds, chunks, 60_000, 0) == [0, rounds * chunks]


@pytest.mark.parametrize("target", TEAMS)
def test_chunks_split_beforehand_would_wait_for_it(target):
    given_up, done = call(target, "blocked", 2, 2, 3, 100, 50, 1)
    assert given_up > 0 and done >= 3 * 50
