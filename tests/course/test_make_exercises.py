"""The generator of the exercises: what it writes, that it always writes the same, and what it refuses."""

import copy
import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tests.book.test_repository import tool

ANSWER = '''def double(x):
    """Twice x."""
    ### BEGIN SOLUTION
    y = x + x
    ### END SOLUTION
    return y'''


def code(source, grade_id=None, points=0, **metadata):
    if grade_id:
        grading = {"grade_id": grade_id, "solution": not points, "grade": points > 0, "locked": points > 0}
        metadata["nbgrader"] = {**grading, "task": False, "schema_version": 3}
        if points:
            metadata["nbgrader"]["points"] = points
            metadata["tags"] = ["check"]
    return new_code_cell(source, metadata=metadata)


def solution(answer=ANSWER):
    title = '<p class="kick">Solutions</p>\n\n# X: solutions\n\nSee the [exercises](../exercises/01_x.ipynb).'
    check = code('check("01.1", double)', "check-double", points=2)
    check.outputs, check.execution_count = [nbformat.v4.new_output("stream", text="PASS\n")], 3
    secret = new_markdown_cell("Because.", metadata={"tags": ["solution-only"]})
    folded = new_code_cell("1", metadata={"tags": ["hide-input"], "collapsed": True})
    return new_notebook(cells=[new_markdown_cell(title), code(answer, "double"), check, secret, folded])


@pytest.fixture
def make(tmp_path, monkeypatch):
    """The generator, on an empty repository."""
    module = tool("make_exercises")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "solutions").mkdir()
    return module


@pytest.fixture
def command(make, monkeypatch, capsys):
    """Runs it as from the command line: its exit status and what it says."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["make_exercises.py", *arguments])
        with pytest.raises(SystemExit) as ended:
            make.main()
        code = ended.value.code
        said = capsys.readouterr().out + (code if isinstance(code, str) else "")
        return int(bool(code)), said

    return run


def test_an_exercise_is_its_solution_without_the_answers(make):
    notebook = make.exercise(solution(), "01_x.ipynb")
    title, setup, stub, check, folded = notebook.cells
    assert "# X: exercises" in title.source and "[solutions](../solutions/01_x.ipynb)" in title.source
    assert "/exercises/01_x.ipynb" in title.source.splitlines()[0]
    assert 'BOOK_PAGE"] = "exercises/01_x.ipynb"' in setup.source
    assert stub.source == (
        'def double(x):\n    """Twice x."""\n    # YOUR CODE HERE\n    raise NotImplementedError\n    return y'
    )
    assert (stub.id, check.id) == ("double", "check-double")
    assert check.outputs == [] and check.execution_count is None
    assert check.metadata.nbgrader.points == 2 and check.metadata.tags == ["check"]
    assert folded.metadata == {"tags": ["hide-input"]}
    assert "solutions/01_x.ipynb" in notebook.metadata.generated


def test_each_method_has_a_stub_of_its_own(make):
    answer = ANSWER.replace("\n", "\n    ")
    notebook = make.exercise(solution(f"class A:\n    {answer}\n\n    {answer.replace('double', 'b')}"), "01_x.ipynb")
    assert notebook.cells[2].source.count("        raise NotImplementedError\n") == 2


def test_the_same_solution_gives_the_same_bytes_whatever_was_run(make):
    first = solution()
    second = copy.deepcopy(first)
    second.cells[2].outputs, second.cells[2].execution_count = [], 17
    for cell in second.cells:
        cell.metadata = nbformat.from_dict(dict(reversed(cell.metadata.items())))
        cell.id = cell.id[::-1]
    one, two = (nbformat.writes(make.exercise(notebook, "01_x.ipynb")) for notebook in (first, second))
    assert one == two


MISTAKES = {
    "begun twice": (
        ANSWER.replace("    y = x", "    ### BEGIN SOLUTION\n    y = x"),
        "inside the region that line 3",
    ),
    "never ended": (ANSWER.replace("### END SOLUTION", "# end"), "line 3: ### BEGIN SOLUTION without an ### END"),
    "never begun": (ANSWER.replace("### BEGIN SOLUTION", "# begin"), "line 5: ### END SOLUTION without a ### BEGIN"),
    "not alone": (ANSWER.replace("### BEGIN", "pass  ### BEGIN"), "line 3: a mark stands alone"),
    "no marks": ("def double(x):\n    return x + x", "has no ### BEGIN SOLUTION"),
    "at top level": ("### BEGIN SOLUTION\ny = 2\n### END SOLUTION", "outside a function"),
    "in an if": ("if True:\n    ### BEGIN SOLUTION\n    y = 2\n    ### END SOLUTION", "outside a function"),
    "in a class body": ("class A:\n    ### BEGIN SOLUTION\n    y = 2\n    ### END SOLUTION", "outside a function"),
    "half a statement": (
        "def f():\n    return (\n        ### BEGIN SOLUTION\n        1\n        ### END SOLUTION\n    )",
        "does not parse",
    ),
}


@pytest.mark.parametrize("answer, says", MISTAKES.values(), ids=MISTAKES)
def test_wrong_marks_are_refused_and_the_cell_is_named(make, answer, says):
    with pytest.raises(ValueError, match=r"^solutions/01_x.ipynb, cell 1 \(double\): ") as error:
        make.exercise(solution(answer), "01_x.ipynb")
    assert says in str(error.value)


def broken(cell, **change):
    """A solution in which the grading of one cell is changed; None removes a key."""
    notebook = solution()
    grading = notebook.cells[cell].metadata.nbgrader
    for key, value in change.items():
        grading.pop(key) if value is None else grading.update({key: value})
    return notebook


METADATA = {
    "marks, no solution": (lambda: broken(1, solution=False), "does not say nbgrader solution: true"),
    "solution, no marks": (lambda: broken(2, solution=True), "has no ### BEGIN SOLUTION"),
    "check tag, no grade": (lambda: broken(2, grade=False), "go together"),
    "grade, no check tag": (lambda: broken(1, grade=True), "go together"),
    "no points": (lambda: broken(2, points=None), "points above 0"),
    "not locked": (lambda: broken(2, locked=False), "needs locked: true"),
    "no schema": (lambda: broken(1, schema_version=None), "also needs schema_version"),
    "same grade_id": (lambda: broken(2, grade_id="double"), "the same grade_id"),
}


@pytest.mark.parametrize("notebook, says", METADATA.values(), ids=METADATA)
def test_metadata_that_nbgrader_would_trip_over_is_refused(make, notebook, says):
    with pytest.raises(ValueError, match=says):
        make.exercise(notebook(), "01_x.ipynb")


def test_marks_in_a_cell_without_metadata_are_refused(make):
    notebook = solution()
    notebook.cells.append(new_code_cell(ANSWER))
    with pytest.raises(ValueError, match=r"cell 5 \(no grade_id\).*does not say"):
        make.exercise(notebook, "01_x.ipynb")


def test_check_changes_nothing_and_names_the_file_and_the_command(command, tmp_path):
    source, target = tmp_path / "solutions" / "01_x.ipynb", tmp_path / "exercises" / "01_x.ipynb"
    nbformat.write(solution(), source)
    assert command("--check") == (1, "exercises/01_x.ipynb is out of step: run make exercises\n")
    assert not target.exists()
    assert command() == (0, "exercises/01_x.ipynb written\n")
    assert target.read_bytes().endswith(b"}\n") and command() == (0, "") and command("--check") == (0, "")

    edited = target.read_text().replace("YOUR CODE", "MY CODE")
    target.write_text(edited)
    assert command("--check")[0] == 1 and target.read_text() == edited


def test_an_exercise_without_a_solution_is_named(command, tmp_path):
    (tmp_path / "exercises").mkdir()
    nbformat.write(solution(), tmp_path / "exercises" / "02_y.ipynb")
    for arguments in ([], ["--check"]):
        status, said = command(*arguments)
        assert status == 1 and "exercises/02_y.ipynb has no solutions/02_y.ipynb" in said


def test_a_wrong_solution_stops_the_command_in_one_sentence(command, tmp_path):
    nbformat.write(solution(MISTAKES["never ended"][0]), tmp_path / "solutions" / "01_x.ipynb")
    status, said = command()
    assert status == 1 and len(said.splitlines()) == 1
    assert not (tmp_path / "exercises").exists()
