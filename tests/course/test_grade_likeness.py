"""How alike answers are, whatever their authors call things: a table for the teacher, and nobody else."""

import ast
import time

import pytest

from course.check import find
from course.check.source import read_notebook
from course.grade.assignment import read_assignment
from course.grade.likeness import _given, _published, definitions, likeness, prints, write_likeness
from course.grade.sheets import read_sheet
from course.grade.submissions import find_submissions
from tests.course.homework import OTHER, RIGHT, ROOT, SETUP, Course

COPY = '''def average_gradients(weights: list, world) -> None:
    """My own words."""
    helpers = comm.all_reduce(  # how many
        torch.tensor([float(w.grad is not None) for w in weights]), world
    )
    "a text that does nothing"
    for w, n in zip(weights, helpers):
        if n:
            mine = torch.zeros_like(w) if w.grad is None else w.grad
            pass
            w.grad = comm.all_reduce(mine, world, op="mean")'''
OWN = """def mean_of(g, group):
    return comm.all_reduce(g, group) / group.size

def average_gradients(params, group):
    there = [p.grad if p.grad is not None else p.new_zeros(p.shape) for p in params]
    flat = mean_of(torch.cat([g.flatten() for g in there]), group)
    at = 0
    for p in params:
        p.grad = flat[at : at + p.numel()].view_as(p)
        at += p.numel()"""


def alike(one, other, name="average_gradients"):
    return likeness(prints(definitions([one]), name), prints(definitions([other]), name))


def test_a_copy_with_other_names_and_another_answer():
    assert alike(RIGHT, COPY) == 1 and alike(RIGHT, OWN) < 0.2
    assert alike(OWN, OWN.replace("mean_of", "f").replace("there", "x").replace("params", "y")) == 1
    assert alike(RIGHT, RIGHT.replace('"mean"', '"max"')) < 1 and alike(RIGHT, RIGHT.replace("zeros", "ones")) < 1


def test_a_helper_counts_wherever_it_is_and_what_is_not_used_does_not():
    helper, _, answer = OWN.partition("\n\n")
    assert alike(f"{answer}\n{helper}\n{RIGHT.replace('average_gradients', 'unused')}", OWN) == 1
    assert alike(answer, OWN) < 1
    one = "class A:\n    def __init__(self, x):\n        self.x = x\n    def get(self):\n        return self.x + 1"
    other = "class B:\n    def __init__(me, y):\n        me.y = y\n    def of(me):\n        return me.y + 1"
    assert likeness(prints(definitions([one]), "A"), prints(definitions([other.replace("me", "self")]), "B")) == 1


@pytest.fixture
def course(tmp_path):
    """A copy, an answer of one's own, the book's solution, a stub; and of 03.2 short answers, all alike."""
    course = Course(tmp_path, exercises={"03.2": 2, "03.1": 3})
    solution = definitions(text for _, text in read_notebook(str(ROOT / "solutions/03_data_parallelism.ipynb")).cells)
    stub = "def average_gradients(params, group):\n    n = group.size + len(params)\n    raise NotImplementedError"
    answers = {"ada": RIGHT, "ben": COPY, "cid": OWN, "dora": ast.unparse(solution["average_gradients"]), "eve": stub}
    for student, answer in answers.items():
        course.hands_in(student, SETUP, answer, OTHER)
    return course


def table(course):
    return {(row["exercise"], row["student"]): row for row in read_sheet(course.grades / "likeness.csv")}


def test_the_table_is_for_the_teacher_alone(course):
    assert course.grade() == 0
    rows = table(course)
    of_long = {student: row for (exercise, student), row in rows.items() if exercise == "03.1"}
    assert {*of_long} == {"ada", "ben", "cid", "dora"}, "a stub has no row"
    assert (of_long["ada"]["most like"], of_long["ada"]["likeness"]) == ("ben", "1.00")
    assert (of_long["ada"]["pairs so alike"], of_long["ada"]["pairs"]) == ("1", "6")
    assert float(of_long["ada"]["usual likeness"]) < 0.3 and float(of_long["cid"]["likeness"]) < 0.3
    assert of_long["dora"]["published solution"] == "solutions/03_data_parallelism.ipynb"
    assert of_long["dora"]["likeness to it"] == "1.00" and float(of_long["cid"]["likeness to it"]) < 0.3
    short = rows["03.2", "eve"]
    assert (short["most like"], short["likeness"], short["usual likeness"]) == ("ada; ben; cid; dora", "1.00", "1.00")
    assert (short["pairs so alike"], short["pairs"]) == ("10", "10")
    first = next(iter(read_sheet(course.grades / "likeness.csv")))
    assert first["exercise"] == "03.1" and first["likeness"] == "1.00", "the least usual is the first"
    for path in (*(course.grades / "feedback").iterdir(), *(course.grades / "students").iterdir()):
        assert "like" not in path.read_text(), path


def test_what_the_handout_gives_is_nobodys(course):
    """What is as it was handed out has no prints."""
    stub = "def average_gradients(params, group):\n    raise NotImplementedError"
    assert prints(definitions([stub]), "average_gradients") <= _given(find("03.1"))
    given = next(path for path in (ROOT / "exercises").glob("03_*.ipynb"))
    own = [text for _, text in read_notebook(str(given)).cells]
    course.asks(exercises={"03.1": 3})
    for student in ("ada", "cid"):
        course.hands_in(student, SETUP, *own, {"ada": RIGHT, "cid": OWN}[student])
    assert course.grade() == 0
    assert float(table(course)["03.1", "cid"]["likeness"]) < 0.2


def test_a_tree_that_cannot_be_compared_is_said(course, monkeypatch):
    def fails(known, name):
        raise RecursionError

    monkeypatch.setattr("course.grade.likeness._given", lambda exercise: frozenset())
    monkeypatch.setattr("course.grade.likeness._published", lambda exercise: {})
    monkeypatch.setattr("course.grade.likeness.prints", fails)
    assert course.grade() == 0
    assert table(course)["03.1", "ada"]["most like"] == "not compared: RecursionError"


def test_odd_and_long_programs_take_no_time():
    odd = ["x = 0x" + "f" * 9000, "return " + "-" * 90 + "1", "a" + ".b" * 2000, "return [" + "1," * 99_999 + "]"]
    began_s = time.process_time()
    for body in odd:
        assert prints(definitions([f"def f():\n    {body}"]), "f")
    assert prints(definitions(["x = 1"]), "f") == frozenset() and likeness(frozenset(), frozenset()) == 0
    assert time.process_time() - began_s < 10


def test_sixty_students_and_seven_exercises_take_seconds(tmp_path):
    """Each program of the book for some of them, under names of their own."""
    course = Course(tmp_path, exercises=dict.fromkeys(ids := [f"03.{k}" for k in range(1, 8)], 1))
    cells = [text for _, text in read_notebook(str(ROOT / "solutions/03_data_parallelism.ipynb")).cells]
    for k in range(60):
        course.hands_in(f"student{k:02}", SETUP, *(cell.replace("group", f"group{k}") for cell in cells))
    asked = read_assignment(str(tmp_path / "hw.json"))
    began_s = time.process_time()
    write_likeness(tmp_path / "likeness.csv", asked, find_submissions(str(course.submissions)))
    taken_s = time.process_time() - began_s
    rows = read_sheet(tmp_path / "likeness.csv")
    assert len(rows) == 60 * len(ids) and {row["pairs"] for row in rows} == {"1770"} and taken_s < 30, taken_s
    assert rows[0]["most like"].endswith(" and 54 more")


@pytest.mark.parametrize("path", sorted((ROOT / "course" / "assignments").glob("*.json")), ids=lambda path: path.stem)
def test_each_exercise_of_a_homework_has_a_published_solution_that_is_not_given(path):
    for exercise in read_assignment(str(path)).exercises:
        public = _published(exercise)
        assert any(name.startswith("solutions/") for name in public)
        assert any(own - _given(exercise) for own in public.values()), exercise.id
