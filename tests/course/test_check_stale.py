"""A check says so, where the last cell that should have defined the answer failed: in IPython, as in each notebook."""

import re
import sys

import pytest

from course.check import stale

interactiveshell = pytest.importorskip("IPython.core.interactiveshell")


@pytest.fixture
def cell(monkeypatch):
    """Runs a cell in a shell of its own, as a kernel does, and returns the function `f` that it leaves."""
    for name in ("_begun", "_stale"):
        monkeypatch.setattr(stale, name, {})
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # which the shell replaces
    shell = interactiveshell.InteractiveShell(history_manager=None)
    monkeypatch.setattr(shell, "showtraceback", lambda *args, **kwargs: None)
    monkeypatch.setattr(shell, "showsyntaxerror", lambda *args, **kwargs: None)
    stale.watch_cells(shell)

    def run(text):
        shell.run_cell(text, store_history=True)
        return shell.user_ns.get("f")

    yield run


F = "def f():\n    return 1\n"
# What a second version of the cell may be, and the error that the sentence names.
FAILED = {
    "def f()\n    return 2": "SyntaxError",
    "def f():\n    return (2": "SyntaxError",
    "def f():\nreturn 2": "IndentationError",
    "x = 1\n  def f():\n    return 2": "IndentationError",
    "%%time\ndef f(:\n    return 2": "SyntaxError",
    "import nowhere\ndef f():\n    return 2": "ModuleNotFoundError",
    "def f(x=missing):\n    return 2": "NameError",
    "@missing\ndef f():\n    return 2": "NameError",
    "1 / 0\nf = lambda: 2": "ZeroDivisionError",
    "if True:\n    raise KeyboardInterrupt\ndef f():\n    return 2": "KeyboardInterrupt",
    "from nowhere import f": "ModuleNotFoundError",
    "f = = 2": "SyntaxError",
    "%matplotlib nowhere\ndef f(:\n    pass": "SyntaxError",
    "class f:\n    x = missing": "NameError",
    "await nothing_here()\ndef f():\n    return 2": "NameError",
}
SAID = (
    "The last cell that defines {} failed{}, so {} is still the earlier version: correct that cell and run it, then "
)


@pytest.mark.parametrize("second", FAILED)
def test_the_version_of_before_is_named_until_the_cell_runs(cell, second):
    assert stale.sentence(cell(F)) == ""
    before = cell(F)
    assert stale.sentence(cell(second)) == SAID.format("f", f" ({FAILED[second]})", "f") + "check again."
    assert stale.sentence(cell("f()")) and cell("x = 1") is before
    assert stale.sentence(cell(F)) == ""


def test_an_error_that_a_magic_shows_and_forgets(cell):
    cell(F)
    assert stale.sentence(cell("%%time\n1 / 0\ndef f():\n    return 2"))


@pytest.mark.parametrize("second", FAILED)
def test_a_helper_of_before_is_named_too(cell, second):
    error, second = FAILED[second], re.sub(r"\bf\b", "g", second)
    cell("def g():\n    return 1\n")
    assert stale.sentence(cell("def f():\n    return [g() for _ in range(2)]")) == ""
    assert stale.sentence(cell(second)) == SAID.format("g", f" ({error})", "g") + "check again."
    assert stale.sentence(cell("def g():\n    return 3")) == ""


@pytest.mark.parametrize(
    "second",
    [
        "f()\n1 / 0",
        "y = f(\n",
        "g = dict(\n    f=3\n",
        "def f():\n    return 2\n1 / 0",
        "%%writefile {folder}/x.py\ndef f():\n    return 2",
        "def g():\n    f = 1 / 0\ng()",
        "class A:\n    def f(self): pass\n1 / 0",
        "f = f",
        "old = f\n\ndef f():\n    return 2\n",
        "# def f(): of before\n1 / 0",
        "text = '''\nf: a word\n'''\n1 / 0",
        "h(lambda: f == 3)",
        "if f == 2:\n  x = (",
    ],
)
def test_no_false_alarm(cell, second, tmp_path):
    cell(F)
    assert stale.sentence(cell(second.replace("{folder}", str(tmp_path)))) == ""


def test_another_function_is_not_meant(cell):
    cell(F + "g = f\n")
    cell(F + F)
    cell("def f(")
    assert stale.sentence(cell("f")) and stale.sentence(cell("f = g")) == stale.sentence(sys.exit) == ""


def test_the_verdict_begins_with_it(cell, own_progress):
    from course import check as checks

    cell("f = None\ndef plan(T_F, T_B, m, part):\n    raise NotImplementedError\n")
    cell("def plan(T_F, T_B, m, part)\n    return 0")
    cell("f = plan")
    text, status = checks.verdict("08.5", cell("f"))
    assert (status, text.splitlines()[1][:50]) == (checks.TODO, "  The last cell that defines plan failed (SyntaxEr")


@pytest.mark.thorough("a kernel imports torch")
@pytest.mark.slow("a kernel imports torch")
def test_in_a_real_kernel(start_notebook):
    cell = start_notebook(CHECK_STRICT="1")  # the reader's own record stays as it is
    stub, said = (
        "def plan(T_F, T_B, m, part):\n    raise NotImplementedError\n",
        "The last cell that defines plan failed",
    )
    cell(f"from course.check import check\n{stub}")
    assert said not in cell('check("08.5", plan)')[1]
    assert cell("def plan(T_F, T_B, m, part)\n    return 0")[0] == "SyntaxError"
    assert said in cell('check("08.5", plan)')[1]
    cell(stub)
    assert said not in cell('check("08.5", plan)')[1]
