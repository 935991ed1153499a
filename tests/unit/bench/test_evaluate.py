"""graft eval: perplexity and accuracy before and after, and that what is wrong shows."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec

import pytest
import torch
from typer.testing import CliRunner

from graft.base.errors import UsageError
from graft.bench.evaluate import evaluate, find_tasks, shipped_text
from graft.bench.evaluate.evaluate import EvalSides, task_result
from graft.bench.evaluate.score import Encoder, answer, cut, likelihoods, windows
from graft.bench.evaluate.tasks import EvalQuestion, EvalTask, read_task
from graft.cli.app import app

VOCABULARY = 256
BYTES = Encoder(None, VOCABULARY)


def successor(ids, decoded):
    """Thinks that every byte is followed by the next one of the alphabet."""
    logits = torch.zeros(len(ids), VOCABULARY)
    for at, one in enumerate(ids):
        logits[at, (one + 1) % VOCABULARY] = 5.0
    return logits


def reversed_successor(ids, decoded):
    return -successor(ids, decoded)


def nan(ids, decoded):
    return torch.full((len(ids), VOCABULARY), math.nan)


def test_shipped_tasks_are_questions_with_one_right_answer_first():
    tasks = find_tasks(["all"])
    assert {task.name for task in tasks} == {"endings", "facts", "grammar", "recall", "sums"}
    for task in tasks:
        assert len(task.questions) >= 30 and task.about and 0.2 < task.chance <= 0.5
        asked = [(one.prompt, one.choices[0]) for one in task.questions]
        assert len(set(asked)) == len(asked)
        for one in task.questions:
            assert len(set(one.choices)) == len(one.choices) >= 2
    sums = next(task for task in tasks if task.name == "sums")
    for one in sums.questions:
        left, sign, right = one.prompt.splitlines()[-1].removesuffix(" =").split()
        assert int(one.choices[0]) == (int(left) + int(right) if sign == "+" else int(left) - int(right))
    for one in next(task for task in tasks if task.name == "recall").questions:
        thing, person = one.prompt.rpartition(" The ")[2].removesuffix(" is").split(" of ")
        assert f"{person} has a {one.choices[0]} {thing}." in one.prompt


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("items: []\nabout: x\n", "no questions"),
        ("about: x\n", "items"),
        ("about: x\nitems:\n- [a, [b, on]]\n", "all text"),
        ("about: x\nitems:\n- [a, [b, b]]\n", "two different answers"),
    ],
)
def test_tasks_of_ones_own_are_checked(text, told, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=told):
        read_task(file)


def test_the_likeliest_answer_counts_and_no_answer_is_never_right():
    question = EvalQuestion("`", ("abc", "xqz"))
    task = EvalTask("t", "", (question,))

    def no_space(ids, decoded):  # the space before an answer is as likely after anything
        logits = successor(ids, decoded)
        logits[:, ord(" ")] = 9.0
        return logits

    assert answer(no_space, BYTES, EvalQuestion("a", ("bcd", "xxx"))) == 0
    assert answer(reversed_successor, BYTES, EvalQuestion("a", ("bcd", "xxx"))) == 1
    assert answer(nan, BYTES, question) is None
    assert answer(successor, BYTES, EvalQuestion("a", ("xax", "yay"))) is None  # alike
    found = task_result(EvalSides(no_space, nan, "b", "a"), BYTES, task)
    assert (found.before, found.after, found.changed, found.lost) == (1.0, 0.0, 1, 1)


def test_one_pass_gives_what_a_pass_for_each_answer_gives():
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(VOCABULARY, VOCABULARY, generator=generator)

    def bigram(ids, decoded):
        return table[torch.tensor(list(ids))]

    pairs = [([5, 6], [7]), ([5, 6], [9])]
    one_by_one = likelihoods(bigram, [*pairs, ([5, 6], [7, 8])])[:2]
    assert likelihoods(bigram, pairs) == pytest.approx(one_by_one, rel=1e-5)
    assert likelihoods(bigram, pairs) != pytest.approx(one_by_one[::-1], rel=1e-5)


def test_texts_are_cut_as_tokens_lie():
    assert cut(BYTES, "ab ", "c") == (list(b"ab"), list(b" c"))
    assert cut(BYTES, "", "xyz") == (list(b"x"), list(b"yz"))
    assert [len(one) for one in windows(range(520), 256)] == [256, 256, 8]
    with pytest.raises(UsageError, match="too short"):
        windows([1])


def test_what_a_wrong_kernel_does_shows():
    def slightly_wrong(ids, decoded):
        logits = successor(ids, decoded)
        logits[-decoded:, 0] += 8.0  # in decode steps alone
        return logits

    text = "".join(map(chr, range(97, 123))) * 4
    given = {"model": "m", "setup": {}}
    same = evaluate(EvalSides(successor, successor, "b", "a"), BYTES, text, 104, (), **given)
    wrong = evaluate(EvalSides(successor, slightly_wrong, "b", "a"), BYTES, text, 104, (), **given)
    assert same.ratio == 1.0 and same.divergence == 0.0 and same.agreement == 1.0
    assert wrong.ratio > 1.2 and wrong.divergence > 0.1 and wrong.agreement < 0.9


def run(*words):
    return CliRunner().invoke(app, ["eval", *words])


@pytest.fixture(scope="module")
def evaluated():
    words = ("tiny-llama", "--dtype", "float32", "--backend", "eager", "--tokens", "40", "--tasks", "grammar")
    done = run(*words, "-t", "fuse_swiglu", "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_the_command_compares_an_engine_without_and_with_a_transform(evaluated):
    assert evaluated["schema"] == "eval/1" and evaluated["setup"]["transforms"] == ["fuse_swiglu"]
    assert evaluated["before"] == "without fuse_swiglu" and evaluated["tokens"] == 40
    assert evaluated["perplexity_ratio"] == pytest.approx(1.0, abs=1e-4) and evaluated["agreement"] > 0.9
    assert 1.0 < evaluated["perplexity_before"] < 1000 and evaluated["notes"] == ["fuse_swiglu: 2 matches"]
    (task,) = evaluated["tasks"]
    assert task["questions"] == 30 and task["chance"] == 0.5 and task["changed"] <= 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["tiny-lama"], "did you mean 'tiny-llama'"),
        (["tiny-llama", "--tasks", "fact"], "did you mean 'facts'"),
        (["tiny-llama", "--text", "nowhere.txt"], "cannot be read as text"),
        (["tiny-llama", "-t", "fuse_swigl"], "fuse_swiglu"),
    ],
)
def test_bad_input(words, told):
    done = run(*words)
    assert done.exit_code == 2 and told in done.output and done.output.count("\n") == 1


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_lm_eval_is_asked_for_by_name_where_it_is_missing():
    done = run("tiny-llama", "--lm-eval", "arc_easy")
    assert done.exit_code == 2 and "pip install 'graft[eval]'" in done.output


def test_lm_eval_runs_a_task_with_graft_s_scorer(tmp_path):
    pytest.importorskip("lm_eval")
    from graft.bench.evaluate.with_lm_eval import run_lm_eval

    rows = [{"p": "ab", "choices": ["cd", "xx"], "answer": 0}, {"p": "bc", "choices": ["aa", "de"], "answer": 1}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "letters.yaml").write_text(
        f"task: letters\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path / 'rows.jsonl'}}}}}\n"
        "output_type: multiple_choice\ntest_split: test\ndoc_to_text: '{{p}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: answer\ntarget_delimiter: ''\nmetric_list: [{metric: acc}]\n"
    )
    sides = EvalSides(successor, reversed_successor, "b", "a")
    found = run_lm_eval(sides, BYTES, ["letters"], None, str(tmp_path))
    assert found["before"]["letters"]["acc,none"] == 1.0 and found["after"]["letters"]["acc,none"] == 0.0
    with pytest.raises(UsageError, match="has no task"):
        run_lm_eval(sides, BYTES, ["lettres"], None, str(tmp_path))


def test_the_text_ships():
    assert len(shipped_text()) > 2000
