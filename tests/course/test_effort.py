"""Each task says its minutes, what it needs and the mistake that it is after; handouts and tables say the same."""

import json
import re
import sys
import tomllib

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from course.check.catalogue import EXERCISES
from course.grade.assignment import read_assignment
from course.release.__main__ import handout
from course.release.effort import EXPLAINED, Effort, efforts, in_notebook
from course.release.words import readme, rubric
from tests.book.book_project import load
from tests.book.test_repository import ROOT, tool

effort = tool("effort")
AFTER = tomllib.loads(effort.AFTER.read_text(encoding="utf-8"))
HOMEWORKS = sorted(ROOT.glob("course/assignments/*.json"))


def sources(path):
    return [cell.source for cell in nbformat.read(path, as_version=4).cells]


# ---- every exercise has the three ------------------------------------------------------------------------------------


def test_each_exercise_says_the_three():
    assert efforts().keys() == EXERCISES.keys() == AFTER.keys()
    for one in efforts().values():
        assert one.minutes >= 5 and one.minutes % 5 == 0
        assert re.search(r"chapter \d", one.needs) and one.after


@pytest.mark.parametrize("id", AFTER)
def test_the_mistake_is_one_that_the_judge_names(id):
    words, part = AFTER[id]
    hints = [" ".join(mistake.hint.split()) for mistake in EXERCISES[id].mistakes]
    assert any(part in hint for hint in hints), f"{id}: no hint has {part!r}"
    assert len(words) <= 60 and not re.search(r"[`=<>]|\.$", words), "a kind of mistake, and nothing of the answer"
    solution = " ".join(re.findall(r"\w+\(", str(EXERCISES[id].solution or "")))
    assert not [name for name in re.findall(r"\w+\(", words) if name in solution]


def test_the_page_of_solutions_says_the_same_and_their_sum():
    for path in sorted(ROOT.glob("solutions/*.ipynb")):
        said = in_notebook(sources(path))
        assert said == in_notebook(sources(ROOT / "exercises" / path.name))
        for folder in ("solutions", "exercises"):
            head = sources(ROOT / folder / path.name)[0]
            assert f"{sum(one.minutes for one in said.values())} minutes, " in head and EXPLAINED in head


# ---- by formula ------------------------------------------------------------------------------------------------------

MARKS = {"grade_id": "a", "locked": False, "schema_version": 3, "task": False}
TITLE = '<p class="kick">Chapter 3</p>\n\n# X\n\n<p class="facts">1 minutes, a few seconds of computing. Old.</p>'
LINK = "[Naive](../chapters/03_data_parallelism.ipynb#naive)"


def notebook(task=f"From {LINK}.", answer="    pass\n", points=2, shown=(), below=""):
    solution = new_code_cell(
        f'def f():\n    """One."""\n    ### BEGIN SOLUTION\n{answer}    ### END SOLUTION\n{below}'
    )
    solution.metadata["nbgrader"] = {**MARKS, "solution": True, "grade": False}
    check = new_code_cell('check("03.1", f)')
    check.metadata["nbgrader"] = {**MARKS, "solution": False, "grade": True, "points": points}
    secret = new_markdown_cell(" word" * 900, metadata={"tags": ["solution-only"]})
    given = [new_code_cell(source) for source in shown]
    cells = [new_markdown_cell(TITLE), new_markdown_cell(f"## 1. T\n\n{task}"), *given, solution, check, secret]
    return new_notebook(cells=cells)


@pytest.mark.parametrize(
    ("how", "minutes"),
    [
        ({}, 5),  # 6 minutes for two points
        ({"points": 4}, 10),  # 12
        ({"task": LINK + " word" * 197}, 10),  # 6 + 5, with the words of the heading and the link
        ({"answer": "    pass\n" * 30}, 10),  # 6 + 5
        ({"task": f"{LINK}\n\n```python\n" + "x = 1\n" * 15 + "```"}, 10),  # 6 + 5
        ({"below": "".join(f"    x = {k}\n" for k in range(15))}, 10),  # 6 + 5, as they are read
        ({"below": "    # A remark.\n" * 15}, 5),
        ({"answer": "    x = 1\n" * 30, "below": "    x = 1\n"}, 5),  # 6, as the line is there
        ({"shown": ["print(1)"]}, 10),  # 6 + 5
        ({"points": 0}, 5),  # never less
    ],
)
def test_minutes_are_by_the_formula_that_is_printed(how, minutes):
    (task,) = effort.tasks(notebook(**how))
    assert task.minutes == minutes


def test_the_code_around_an_answer_is_counted_without_heads_and_remarks():
    stub = """class A:
    '''A text.'''

    @staticmethod
    def forward(x):
        if x:
            return x  # 2 lines
        ### BEGIN SOLUTION
        y = x
        ### END SOLUTION

    def b(self, x):
        return [
            x
        ]
"""
    assert effort.given_lines(stub) == ["if x:", "return x  # 2 lines", "return [", "x", "]"]


def test_the_sentence_has_the_numbers_of_the_formula():
    count = {3: "three", 5: "five"}
    words = count[effort.POINT_MIN], effort.WORDS_A_MINUTE, effort.GIVEN_LINES_A_MINUTE, effort.ANSWER_LINES_A_MINUTE
    said = "{} for each point of the book, one for {} words of the task, for {} lines of code in it and for {} lines"
    assert said.format(*words) in EXPLAINED
    shown, nearest = count[effort.SHOWN_MIN], count[effort.ROUND_MIN]
    assert f"{shown} for a cell that shows something; to the nearest {nearest}" in EXPLAINED


@pytest.mark.parametrize(
    ("task", "needs"),
    [
        (f"From {LINK}.", "chapter 3"),
        (f"[A](../chapters/05b_fsdp_deeper.ipynb) and {LINK}.", "chapter 3 and the deeper page of chapter 5"),
        ("[A room](../chapters/15b_museum.ipynb#a).", "the museum of chapter 15"),
        (f"[A](../chapters/10c_latency.ipynb#a) and {LINK}.", "chapter 3 and chapter 10c"),
        (f"{LINK}, with `f` of exercise 2.", "chapter 3 and exercise 03.2"),
    ],
)
def test_what_a_task_needs_is_what_it_links_to(task, needs):
    (found,) = effort.tasks(notebook(task))
    assert found.needs == needs


def test_the_line_is_written_once_and_again_when_it_is_old():
    made = notebook()
    effort.state_effort(made)
    once = [cell.source for cell in made.cells]
    expected = Effort(5, "chapter 3", AFTER["03.1"][0])
    assert once[1].startswith(f"## 1. T\n\n{expected.line}\n\nFrom [Naive]")
    assert once[0].endswith(f'<p class="facts">5 minutes, a few seconds of computing. {EXPLAINED}</p>')
    made.cells[1].source = once[1].replace("5 minutes", "55 minutes")
    effort.state_effort(made)
    assert [cell.source for cell in made.cells] == once
    assert in_notebook(once) == {"03.1": expected}


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="03.1: its task links to no chapter"):
        effort.state_effort(notebook("No link."))
    bare = notebook()
    bare.cells[0].source = "# X"
    with pytest.raises(ValueError, match="its first cell has one line"):
        effort.state_effort(bare)
    (tmp_path / "after.toml").write_text("", encoding="utf-8")
    monkeypatch.setattr(effort, "ROOT", tmp_path)
    monkeypatch.setattr(effort, "AFTER", tmp_path / "after.toml")
    with pytest.raises(ValueError, match='exercise 03.1 needs a line in after.toml: "03.1" = '):
        effort.state_effort(notebook())


def test_an_exercise_that_builds_on_another_says_so():
    assert efforts()["04.6"].needs == "chapter 4 and exercise 04.1"


# ---- page, handout and rubric agree ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", HOMEWORKS, ids=lambda path: path.stem)
def test_handout_and_rubric_say_what_the_page_says(path):
    assignment = read_assignment(str(path))
    files = handout(assignment)
    in_tasks = {}
    for name, content in files.items():
        if name.startswith("exercises/"):
            in_tasks |= in_notebook(cell["source"] for cell in nbformat.reads(content, as_version=4).cells)
    ids = [exercise.id for exercise in assignment.exercises]
    known = {id: efforts()[id] for id in ids}
    assert in_tasks == known
    table = {row.split(" ")[1]: row for row in files["README.md"].splitlines() if row.startswith("| ")}
    for id, one in known.items():
        assert table[id].endswith(f"| {one.minutes} | {one.needs} | {one.after} |")
    assert f"| {sum(one.minutes for one in known.values())} |" in table["together"]
    for text in (files["README.md"], files["rubric.md"], rubric(assignment, for_teacher=True)):
        assert EXPLAINED in text
    for text in (files["rubric.md"], rubric(assignment, for_teacher=True)):
        for id, section in zip(ids, re.split(r"^## ", text, flags=re.MULTILINE)[1:], strict=False):
            assert section.startswith(id) and f"\n\n{known[id].said}\n" in section


def test_the_teachers_table_has_all_of_them():
    html = load("book_exercises").effort()
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)]
    said = {row[0]: row[1:] for row in rows if row}
    asked = {path.stem: json.loads(path.read_text(encoding="utf-8"))["exercises"] for path in HOMEWORKS}
    for id, one in efforts().items():
        given = ", ".join(name for name, ids in asked.items() if id in ids)
        plain = [cell.replace("&#x27;", "'") for cell in said.pop(id)]
        assert plain == [f"{one.minutes}", one.needs, one.after, given]
    assert not said and EXPLAINED in html
    assert "```{effort-table}" in (ROOT / "book" / "teaching.md").read_text(encoding="utf-8")


# ---- is it plausible? ------------------------------------------------------------------------------------------------


def minutes_of(chapter):
    """To read and to practise, as the chapter says."""
    text = next(ROOT.glob(f"chapters/{chapter}_*.md")).read_text(encoding="utf-8")
    return sum(map(int, re.search(r"^(\d+) minutes to read, (\d+) to practise", text, re.MULTILINE).groups()))


@pytest.mark.parametrize("path", [path for path in HOMEWORKS if path.stem != "capstone"], ids=lambda path: path.stem)
def test_the_hours_of_a_homework_are_two_or_three_times_its_tasks_and_chapters(path):
    """The capstone trains models: most of its hours are no exercise."""
    assignment = read_assignment(str(path))
    whole = sum(efforts()[exercise.id].minutes for exercise in assignment.exercises)
    whole += sum(map(minutes_of, assignment.chapters))
    assert 1.5 <= 60 * assignment.hours / whole <= 3


def test_the_guide_for_teachers_has_the_minutes_of_chapter_16():
    total = sum(one.minutes for id, one in efforts().items() if id.startswith("16."))
    assert f"Its exercises take {total} minutes." in (ROOT / "book" / "teaching.md").read_text(encoding="utf-8")
    assert 90 <= total <= 105  # 90 had been estimated by hand


def test_a_homework_without_known_minutes_is_still_written(monkeypatch):
    monkeypatch.setattr(sys.modules["course.release.words"], "efforts", dict)
    assignment = read_assignment(str(HOMEWORKS[1]))
    assert "| 01.1 `state_bytes` | 2 |  |  |  |" in readme(assignment, [])
    assert "minutes; needs" not in rubric(assignment)
