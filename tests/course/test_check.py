"""Each named mistake is made here once, and must be recognised; different right answers must pass."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from course import check as checks
from course.check import check, find, hints, progress, record, running, verdict
from course.check.__main__ import main
from course.check.catalogue import EXERCISES
from course.check.cells import NotebookError
from course.check.compare import plain, same
from course.check.difference import difference
from course.check.exercise import Exercise, Mistake, everywhere
from course.check.judge import judge, new_seed
from course.check.listen import Heard, listen, raw
from course.check.running import in_ranks
from course.check.source import Answer, read_notebook
from course.check.tried import Tried, too_few, try_right, try_wrong
from course.exercises.ch03.e03_1_average_gradients import average_gradients
from lib import comm
from lib.launch import RankError, RunError, run
from tests.course.answers import notebook
from tests.course.bytes_sent import right_bytes

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("own_progress")


def unlike(tried: Tried) -> Tried:
    """The programs that did not come out as they must."""
    return [one for one in tried if not one[0]]


@pytest.mark.parametrize("exercise_id", sorted(EXERCISES))
def test_there_are_enough_programs(exercise_id):
    assert too_few(EXERCISES[exercise_id]) == []


@pytest.mark.parametrize("exercise_id", sorted(EXERCISES))
def test_right_answers_pass(exercise_id):
    for row, exercise in EXERCISES[exercise_id].rows.items():
        tried = try_right(exercise, seed := new_seed())
        assert tried and not unlike(tried), (row, seed, unlike(tried))


HANGS = [
    pytest.mark.slow("a program that hangs is waited for, and so is each wrong one that may be it"),
    pytest.mark.thorough("a program that hangs is waited for"),
]
LATER = pytest.mark.thorough("one of each chapter is enough: make kills tries each exercise that changes")


def hangs_too(exercise: Exercise) -> bool:
    return any(mistake.hangs for mistake in exercise.mistakes)


def has_few(exercise: Exercise) -> bool:
    return not (hangs_too(exercise) or exercise.variants) and len(exercise.mistakes) <= 20


FIRST = {e.chapter: i for i, e in reversed([*EXERCISES.items()]) if has_few(e)}


def marks(exercise: Exercise):
    if hangs_too(exercise):
        return HANGS
    return () if exercise.id in FIRST.values() else LATER


@pytest.mark.parametrize("exercise_id", [pytest.param(i, marks=marks(EXERCISES[i])) for i in sorted(EXERCISES)])
def test_each_mistake_is_named(exercise_id):
    for row, exercise in EXERCISES[exercise_id].rows.items():
        tried = try_wrong(replace(exercise, ranks=exercise.ranks[:2]), seed=3)
        assert tried and not unlike(tried), (row, unlike(tried))


def test_only_rows_differ_from_the_task_of_the_book():
    for exercise in EXERCISES.values():
        tasks = [one.task for one in exercise.variants if exercise.chapter != "15"]
        assert len({*tasks}) == len(tasks) and all(tasks), exercise.id
        assert not (tasks and exercise.task), f"{exercise.id} of the book has the text of a row"


def test_an_answer_to_another_row_is_named():
    """In a homework that varies an exercise, a copied answer gets no points, and is told whose task it is for."""
    exercise = find("02.4")
    rows = exercise.rows
    assert [*rows] == ["", "A", "B", "C"] and not rows[""].task and rows["A"].task != rows["B"].task
    for row, other in (("A", ""), ("A", "B"), ("B", "A")):
        text, status = verdict("02.4", rows[other].right[1], row=row)
        whose = f"row {other}" if other else "the task in the book"
        told = " ".join(text.split())
        assert status == "FAIL" and f"This is right for {whose}. You have row {row}: {rows[row].task}" in told
        assert f", row {row} " in text and f'check("02.4", gather_shards, row="{row}", seed=' in text
        assert verdict("02.4", rows[row].right[1], row=row)[1] == "PASS"
    for i, row, words in (("02.4", "D", "has the rows A, B, C, and row is 'D'"), ("03.2", "A", "03.2 has no rows")):
        with pytest.raises(ValueError, match=words):
            verdict(i, adds, row=row)
    assert verdict("02.4", rows["B"].right[1], row="b")[1] == "PASS"


def test_inputs_are_fresh_and_a_seed_brings_them_back():
    exercise = find("03.1")
    first, again = (exercise.inputs(torch.Generator().manual_seed(1), 3) for _ in range(2))
    other = exercise.inputs(torch.Generator().manual_seed(2), 3)
    assert same(first[0], again[0]) and not same(first[0], other[0])
    seen = []

    def unlike_any(params, group):
        for p in params:
            p.grad = None if p.grad is None else p.grad + 1

    for seed in (5, 5, None, None):
        numbers, _, last_line = verdict("03.1", unlike_any, seed)[0].rpartition("\n")
        assert "expected" in numbers and "got" in numbers and f"seed={seed or ''}" in last_line
        seen.append(numbers)
    assert seen[0] == seen[1] and len(set(seen)) == 3


def adds(x, group):
    return comm.all_reduce(x, group)


def doubles_in_place(x, group):
    return x.mul_(2)


def draws(x, group):
    return torch.rand(3, dtype=x.dtype)


def passes_on(x, group):
    """From rank 0 to rank 1."""
    if group.rank == 0:
        comm.send(2 * x, group, 1)
    return comm.recv(x, group, 0).wait() if group.rank == 1 else x


def sends_for_nothing(x, group):
    if group.rank == 0:
        comm.send(x, group, 1)
    return adds(x, group)


def stumbles(x, group):
    return adds(x, group) / (1 if group.rank else None)


def waits_alone(x, group):
    return adds(x, group) if group.rank else x


def waits_alone_on_0(x, group):
    return x if group.rank else adds(x, group)


ADDS = Exercise(
    id="00.1",
    title="adds",
    points=1,
    body=lambda answer, group, given: {"y": answer(given["x"], group)},
    inputs=lambda generator, n: [{"x": torch.rand(3, generator=generator, dtype=torch.float64)} for _ in range(n)],
    reference=lambda given: everywhere({"y": sum(g["x"] for g in given)}, given),
    mistakes=(),
    ranks=(3,),
)


def adds_in_torch(x, group):
    dist.all_reduce(x)
    return x


def adds_in_two_lines(x, group):
    pending = comm.all_reduce_start(x, group)
    return pending.wait()


@pytest.mark.parametrize(
    ("body", "outcomes"), [(ADDS.body, ["PASS", "PASS", "PASS"]), (raw(ADDS.body), ["PASS", "FAIL", "FAIL"])]
)
def test_only_a_raw_exercise_minds_who_sends_also_without_a_reference(body, outcomes):
    exercise = replace(ADDS, body=body, reference=None, right=(adds_in_torch,))
    cases = [case for (case,) in judge(exercise, [adds_in_torch, adds, adds_in_two_lines], seed=1)]
    assert [case.status for case in cases] == outcomes
    assert all("torch.distributed alone" in case.hint for case in cases if case.status == "FAIL"), cases


LISTENED: list[Heard] = []  # in a rank: by the body, for each answer


def test_a_body_hears_its_own_answer_and_no_later_one():
    def body(answer, group, given):
        before = [heard.collectives for heard in LISTENED]
        LISTENED.append(listen())
        answer(given["x"], group)
        return {"what earlier ones heard": [heard.collectives for heard in LISTENED[:-1]], "before": before}

    exercise = replace(ADDS, body=body)
    (ranks, *later) = in_ranks(exercise, [adds, adds, adds], [{"x": torch.ones(1)}] * 3)
    assert ranks[0]["before"] == [] and [one[0]["what earlier ones heard"] for one in later] == [[1], [1, 1]]


def test_an_exercise_of_a_teacher_is_checked_as_those_of_the_book_are(capsys):
    check(ADDS, adds)
    check(ADDS, draws, seed=7)
    progress()
    right, wrong, total = capsys.readouterr().out.partition("FAIL")
    assert right.startswith("PASS  00.1 adds   1/1 points") and "check(…, adds, seed=7)" in total
    assert (
        "\nall         0/1 points\n\nBest so far, with earlier sessions:\nchapter 1 " in total
        and "Next to do: " in total.splitlines()[-1]
    )


def test_nbgrader_counts_an_answer_that_is_partly_right(monkeypatch):
    """It takes the number that a cell returns, and 0 where it raises."""
    exercise = replace(ADDS, points=4, ranks=(3, 4))
    with_three = lambda x, group: adds(x, group) * (group.size == 3)  # noqa: E731
    assert check(exercise, with_three) is None
    monkeypatch.setattr(checks, "NBGRADER", True)
    assert check(exercise, with_three) == 2 and check(exercise, adds) is None
    with pytest.raises(AssertionError, match="0/4 points"):
        check(exercise, draws)
    monkeypatch.setattr(checks, "NBGRADER", False)
    monkeypatch.setenv("CHECK_STRICT", "1")
    with pytest.raises(AssertionError, match=r"(?s)FAIL .* 2/4 points\n  \[x\] 3 ranks\n  \[ \] 4 ranks"):
        check(exercise, with_three)


@pytest.fixture
def runs(monkeypatch):
    """The runs that the judge has started."""
    started = []
    counted = lambda *args, **kwargs: started.append(1) or run(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(running, "run", counted)
    return started


def without_times(verdicts):
    return re.sub(r"for \d+\.\d s", "for _ s", str(verdicts))


@pytest.mark.thorough("hangs are waited for")
def test_where_a_wrong_program_hangs_is_found_out_once(runs):
    """To run it takes seconds: the second FAIL by a hang does not wait for it again."""
    exercise = replace(ADDS, mistakes=(Mistake("Rank 0 alone calls it.", waits_alone_on_0, hangs=True),))
    first, second = (judge(exercise, [waits_alone], seed=seed)[0][0] for seed in (1, 2))
    assert without_times(first) == without_times(second) and first.hint.startswith("hang: ranks 1 and 2 wait"), first
    assert len(runs) == 2 + 1
    assert judge(exercise, [waits_alone_on_0], seed=1)[0][0].hint.startswith("Rank 0 alone calls it.")
    assert len(runs) == 3 + 1


@pytest.mark.parametrize(
    ("answers", "count"),
    [
        ([doubles_in_place, adds, draws, draws, passes_on, adds], 1),
        ([sends_for_nothing, passes_on], 1 + 2),
        ([adds, stumbles, adds], 1 + 3),
        ([waits_alone, adds], 1 + 2),
    ],
)
def test_answers_that_are_tried_together_are_judged_as_if_alone(answers, count, runs):
    """What one leaves behind, in its numbers, in the generator or on the wire, is not for the next."""
    alone = [judge(ADDS, [answer], seed=1)[0] for answer in answers]
    runs.clear()
    assert without_times(judge(ADDS, answers, seed=1)) == without_times(alone)
    assert len(runs) == count
    assert [case.status for (case,) in alone] == [
        "PASS" if f in (adds, sends_for_nothing) else "FAIL" for f in answers
    ]


def test_wrong_programs_run_a_few_at_a_time_and_in_a_later_case_the_known_one_first(monkeypatch):
    ran = []

    def named(k):
        def wrong(x, group):
            return x + k

        return Mistake(f"It adds {k}.", wrong)

    def counted(exercise, programs, inputs):
        ran.append(len(programs))
        return in_ranks(exercise, programs, inputs)

    monkeypatch.setattr(hints, "in_ranks", counted)
    exercise = replace(ADDS, ranks=(2, 3, 4), mistakes=tuple(named(k) for k in range(1, 14)))
    for k, runs in ((2, [4, 1, 1]), (6, [4, 8, 1, 1]), (99, [4, 8, 1])):
        ran.clear()
        (cases,) = judge(exercise, [named(k).wrong], seed=1)
        assert [case.hint for case in cases] == [f"It adds {k}."] * 3 if k < 14 else "is not right" in cases[2].hint
        assert ran == runs, (k, ran)
    ran.clear()
    assert [cases[2].hint for cases in judge(exercise, [named(k).wrong for k in (1, 13)], seed=1)] == [
        "It adds 1.",
        "It adds 13.",
    ]
    assert ran == [13] * 3


def test_a_wrong_program_that_raises_names_nothing():
    exercise = replace(ADDS, mistakes=(Mistake("It stumbles.", stumbles), Mistake("It doubles.", doubles_in_place)))
    (cases,) = judge(exercise, [doubles_in_place], seed=1)
    assert [case.hint for case in cases] == ["It doubles."]


@pytest.mark.parametrize("exercise_id", ["08.3", "14.2", "16.4"])
def test_of_an_answer_without_arguments_what_is_expected_is_not_printed(exercise_id):
    exercise = EXERCISES[exercise_id]
    assert exercise.is_fixed and not EXERCISES["03.1"].is_fixed
    (right,) = in_ranks(exercise, exercise.right[:1], exercise.inputs(torch.Generator(), 1))[0]
    ((case,),) = judge(
        exercise, [lambda: [["none", "of", "them", "here"][: 3 + (exercise_id == "14.2")]] * 3], seed=1
    )
    assert case.status == "FAIL" and "got       'none'" in case.hint
    assert "expected" not in case.hint and not any(repr(value) in case.hint for value in right.values())


# ---- what else can happen to an answer ------------------------------------------------------------------------------


def not_done(params, group):
    raise NotImplementedError


def raises(params, group):
    nothing = {}
    return nothing["the key"]


def hangs(params, group):
    if group.rank == 0:
        comm.all_reduce(params[0].grad, group)


def sends_first(params, group):
    comm.send(params[0].grad, group, dst=(group.rank + 1) % group.size).wait()


def mismatched(params, group):
    comm.all_reduce(params[0].grad[group.rank % 2 :], group)


def leaves(params, group):
    os._exit(0)


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        (not_done, "TODO", ["Replace `raise NotImplementedError`"]),
        (raises, "FAIL", ["KeyError: 'the key'", "test_check.py", "in raises"]),
        (hangs, "FAIL", ["rank 0  waits in all_reduce", "did not call it", "the same collective calls"]),
        (sends_first, "FAIL", ["waits in send to 1", "the cycle", "Every rank sends first"]),
        (mismatched, "FAIL", ["disagree", "[3, 4]", "[2, 4]"]),
        (leaves, "FAIL", ["exited without returning"]),
    ],
)
def test_what_is_said(answer, status, words, monkeypatch):
    monkeypatch.setitem(EXERCISES, "03.1", replace(EXERCISES["03.1"], ranks=(3,)))
    text, got = verdict("03.1", answer)
    assert got == status
    for word in words:
        assert word in text, text
    assert "course/check" not in text


def test_endless_loop(monkeypatch):
    def forever(params, group):
        while True:
            pass

    monkeypatch.setitem(EXERCISES, "03.1", replace(EXERCISES["03.1"], timeout_s=1, ranks=(3,)))
    text, status = verdict("03.1", forever)
    assert status == "FAIL" and "endless loop" in text and "in forever" in text and "course/check" not in text


ODD = {
    "sparse": lambda x: x.to_sparse(),
    "compressed": lambda x: x.to_sparse_csr(),
    "meta": lambda x: x.to("meta"),
    "nested": lambda x: torch.nested.nested_tensor([x[0], x[1, :2]]),
    "complex": lambda x: x * 1j,
    "no float": lambda x: 10**400,
    "not to be printed": lambda x: 10**5000,
    "in a list": lambda x: [10**400, 10**5000],
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("wanted", [torch.eye(3), torch.eye(3)[0], 2.5, 7, "a word", [1.5, 2]], ids="ABCDEF")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_odd_values_differ_and_can_be_told(odd, wanted):
    value = ODD[odd](torch.ones(3, 3).double())
    for got in (value, plain(value)):
        assert not same({"y": got}, {"y": wanted})
        assert "is not right" in difference([{"y": got}], [{"y": wanted}], {})


def test_an_object_that_equals_everything_is_compared_as_data():
    """nbgrader and the terminal have no jail that makes data of it."""

    class Equal:
        __eq__ = lambda self, other: True  # noqa: E731
        __hash__ = None

    exercise = replace(ADDS, reference=lambda given: everywhere({"y": 7, "z": "a word"}, given))
    exercise = replace(exercise, body=lambda answer, group, given: {"y": answer(), "z": answer()})
    (cases,) = judge(exercise, [Equal], seed=1)
    assert [case.status for case in cases] == ["FAIL"] and "a Equal" in cases[0].hint


@pytest.mark.parametrize(
    ("error", "fault"), [(RunError("the disk is full"), True), (RankError("rank 0 raised", 0, "ValueError"), False)]
)
def test_what_is_the_machines_fault_is_told_apart(error, fault, monkeypatch):
    """A grader then gives no verdict."""

    def fails(*args, **kwargs):
        raise error

    monkeypatch.setattr(running, "run", fails)
    assert in_ranks(ADDS, [adds], [{}] * 3)[0].fault is fault


def test_a_missing_return_is_told():
    text, status = verdict("03.3", lambda gradients, bucket_bytes, group: None)
    assert status == "FAIL" and "is a `return` missing?" in text


def test_wrong_use():
    with pytest.raises(ValueError, match=r"there is no exercise '03\.11'; did you mean '03\.1'"):
        check("03.11", average_gradients)
    with pytest.raises(ValueError, match=r"there is no exercise '5\.4'; did you mean '05\.4'"):
        check("5.4", average_gradients)
    with pytest.raises(ValueError, match=r"there are 01\.1, 01\.2"):
        check("xyz", average_gradients)
    with pytest.raises(TypeError, match="needs your function average_gradients, not int"):
        check("03.1", 3)


def test_what_check_prints(capsys, monkeypatch):
    assert check("03.9", right_bytes) is None
    assert check("03.9", lambda p, b, n: 0) is None
    printed = capsys.readouterr()
    wanted = "PASS  03.9 bytes_sent   1/1 points\n  [x] several sizes\nFAIL  03.9 bytes_sent   0/1"
    assert printed.out.startswith(wanted) and printed.err == ""
    progress()
    said, _, advice = capsys.readouterr().out.partition("Next to do: ")
    table = r"average_gradients +0/2   not checked yet\n.*03.9  bytes_sent +0/1\nall +0/17 points\n\nBest so far, .*:"
    assert said.startswith("In this session:\n")
    assert re.search(table, said, re.S)
    assert advice == "03.1 average_gradients, in exercises/03_data_parallelism.ipynb\n"
    assert json.loads(record.place().read_text())["03.9"]["max"] == 1


# ---- from a file ----------------------------------------------------------------------------------------------------


def test_only_definitions_are_taken(tmp_path):
    cells = (
        "import torch\nFACTOR = 2\nprint('no')\nx = open('/nowhere')\n%matplotlib inline\n!rm -rf /",
        "while True: pass",
        "def f(p, b, n):\n    return FACTOR * g(n) * p * b\ncheck('03.9', f)",
        "def g(n:\n  broken",
        "def g(n):\n    return (n - 1) / n",
    )
    read = read_notebook(notebook(tmp_path, *cells))
    names, notes = read.define()
    assert read.checks == (("03.9", "f", ""),) and names["f"](8, 1, 4) == 12
    assert "x" not in names and not notes and "code cell 4, line 1 does not parse" in read.notes[0]
    assert read.defines("f") and read.defines("FACTOR") and not read.defines("torch")
    assert verdict("03.9", names["f"])[1] == "PASS"
    assert judge(EXERCISES["03.9"], [Answer(read, "f")], seed=1)[0][0].status == "PASS"


def test_much_code_is_not_parsed(tmp_path):
    with pytest.raises(NotebookError, match="has 1,200,000 letters of code, and 1,048,576 are read"):
        read_notebook(notebook(tmp_path, "x=1\n" * 150_000, "x=1\n" * 150_000))


def test_a_stub_is_told_from_an_answer(tmp_path):
    stub = 'def f(x):\n    """It does."""\n    raise NotImplementedError'
    assert read_notebook(notebook(tmp_path, stub, "def g():\n    return 1\nX = 3")).names == {
        "f": False, "g": True, "X": True,
    }  # fmt: skip
    assert read_notebook(notebook(tmp_path, stub, "def f(x):\n    return x")).names == {"f": True}


def test_an_answer_in_words_is_found_where_its_metadata_is_lost(tmp_path):
    cells = ["**why** (5 points). Why?", "Because.", "**how** (2 points). How?", "**who** (1 points). Who?", "I."]
    path = tmp_path / "words.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": text} for text in cells]}))
    assert read_notebook(str(path)).texts == {"why": "Because.", "who": "I."}


@pytest.mark.slow("a process that imports torch, and twelve verdicts")
def test_the_terminal_gives_the_same_verdicts(capsys):
    command = [sys.executable, "-m", "course.check", str(ROOT / "solutions" / "01_memory.ipynb")]
    environment = os.environ | {"CHECK_STRICT": "1"}  # keeps no progress in the book's folder
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("PASS") == 6 and "13/13 points" in done.stdout
    assert main([str(ROOT / "exercises" / "01_memory.ipynb")]) == 1
    out, err = capsys.readouterr()
    assert err == "" and out.count("TODO") == 6 and "0/13 points" in out


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: d / "none.ipynb", "does not exist"),
        (lambda d: d, "is a folder"),
        (lambda d: (d / "x.ipynb", (d / "x.ipynb").write_bytes(b"\x00\xffabc"))[0], "not JSON"),
        (lambda d: (d / "y.ipynb", (d / "y.ipynb").write_text("[1, 2]"))[0], "no list of cells"),
        (lambda d: (d / "z.ipynb", (d / "z.ipynb").write_text("[" * 100_000))[0], "not JSON"),
    ],
)
def test_what_is_no_notebook(tmp_path, make, words):
    with pytest.raises(NotebookError, match=words):
        read_notebook(str(make(tmp_path)))


def test_bad_input_in_the_terminal_is_one_sentence(tmp_path, capsys):
    for path, words in (
        (str(tmp_path / "none.ipynb"), "does not exist"),
        (str(tmp_path), "is a folder"),
        (notebook(tmp_path, "check('03.99', f)\ndef f(): pass"), "there is no exercise '03.99'"),
        (notebook(tmp_path, "check('03.99', f)"), "there is no exercise '03.99'"),
        (notebook(tmp_path, "1 + 1"), "has no exercise: no cell calls"),
    ):
        assert main([path]) == 2
        out, err = capsys.readouterr()
        assert out == "" and words in err and err.count("\n") == 1
