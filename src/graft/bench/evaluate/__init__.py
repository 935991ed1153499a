"""How well a model predicts, before and after a transform: perplexity of a text, accuracy on small tasks."""

from graft.bench.evaluate.evaluate import Evaluation, TaskResult, evaluate
from graft.bench.evaluate.tasks import EvalTask, find_tasks, shipped_text

__all__ = ["EvalTask", "Evaluation", "TaskResult", "evaluate", "find_tasks", "shipped_text"]
