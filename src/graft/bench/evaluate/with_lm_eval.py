"""lm-eval's tasks with graft's scorers, in one process: no server, no copies of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from graft.base.errors import ExtraMissing, PeerNotRun, UsageError
from graft.bench.evaluate.evaluate import EvalSides
from graft.bench.evaluate.score import Encoder, Scorer, cut, likelihood, windows


def require_lm_eval() -> None:
    if find_spec("lm_eval") is None:
        raise ExtraMissing("--lm-eval", "eval", "lm_eval")


def run_lm_eval(
    sides: EvalSides, encode: Encoder, names: Sequence[str], limit: int | None, include: str | None
) -> dict[str, Any]:
    """lm-eval's numbers before and after, task by task. Its data sets come from where it finds them."""
    import lm_eval  # pyrefly: ignore[missing-import]
    from lm_eval.tasks import TaskManager  # pyrefly: ignore[missing-import]

    manager = TaskManager(include_path=include)
    known = set(manager.all_tasks)
    for name in names:
        if name not in known:
            raise UsageError(f"lm-eval has no task {name!r}")
    found = {}
    for side, score in (("before", sides.before), ("after", sides.after)):
        try:
            done = lm_eval.simple_evaluate(
                model=adapter(score, encode), tasks=list(names), task_manager=manager, limit=limit, bootstrap_iters=0
            )
        except (OSError, ConnectionError) as error:
            raise PeerNotRun("lm-eval: " + " ".join(str(error).split())[:300]) from error
        found[side] = {name: numbers(rows) for name, rows in done["results"].items()}
    return found


def numbers(rows: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in rows.items() if isinstance(value, (int, float))}


def adapter(score: Scorer, encode: Encoder) -> Any:
    from lm_eval.api.model import LM  # pyrefly: ignore[missing-import]

    class ScorerLM(LM):
        """Likelihoods alone: a scorer does not sample."""

        def loglikelihood(self, requests: Any) -> list[tuple[float, bool]]:
            return [self.one(*request.args) for request in requests]

        def one(self, context: str, ending: str) -> tuple[float, bool]:
            return likelihood(score, *cut(encode, context, ending))

        def loglikelihood_rolling(self, requests: Any) -> list[float]:
            return [
                sum(likelihood(score, part[:1], part[1:])[0] for part in windows(encode(request.args[0])))
                for request in requests
            ]

        def generate_until(self, requests: Any) -> list[str]:  # noqa: ARG002 (lm-eval's signature)
            raise UsageError("--lm-eval takes tasks of likelihoods; for tasks that generate use graft serve")

    return ScorerLM()
