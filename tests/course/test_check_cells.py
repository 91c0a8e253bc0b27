"""Odd notebooks: a right answer in any form is read, or a sentence names the cell in which it is, or which it needs."""

import ast
import json
import re

import pytest

from course.check.__main__ import main
from course.check.cells import NotebookError, read_cells
from course.check.judge import judge
from course.check.magics import as_python, parse
from course.check.source import Answer, read_notebook
from course.check.statements import Statement
from tests.course.answers import notebook
from tests.course.bytes_sent import BYTES

F = "def f(p, b, n):\n    return p * b * 2 * (n - 1) / n\n"
CHECK = "check('03.9', f)"
BY_N = "{n: 2 * (n - 1) / n for n in range(1, 65)}"
WITH = "def f(p, b, n):\n    return p * b * TABLE[n]\n"  # needs TABLE[n] = 2 * (n - 1) / n
FILL = "for n in range(1, 65):\n    TABLE[n] = 2 * (n - 1) / n\n"
INDENTED = F.replace("\n", "\n    ").rstrip()


def text(kind, source):
    return {"cell_type": kind, "source": source}


READ = {
    "plain": [F],
    "a magic over several lines": ["!pip install -q \\\n    numpy \\\n    torch\n" + F],
    "a magic in if": ["if True:\n    !ls\n    %cd /\n" + F],
    "a magic in except": ["try:\n    import torch\nexcept ImportError:\n    !pip install torch\n" + F],
    "a line that begins with %": ["!ls\n" + F.replace("/ n", "/ int('%d'\n        % n)").replace("return ", "return ")],
    "a string with magics": ["%matplotlib inline\nx = '''\n!ls\n%time\n'''\n" + F],
    "a quote in a command": ["!echo it's (\n" + F],
    "a command's value": ["files = !ls\na, b = !ls\nwhere = %pwd\n" + F],
    "questions": ["?f\nf?\nf??\nx = f?\n" + F + "# what?\n%%time?"],
    "%%time": ["%%time\n" + F],
    "%%capture below a blank line": ["\n  \n%%capture out --no-stderr\n" + F],
    "%time def": ["%time x = 3\n%time\n" + F],
    "a cell that is indented": ["    " + INDENTED + "\n    !ls"],
    "an example with prompts": [">>> " + F.replace("\n    ", "\n...     ") + "... \n>>> !ls"],
    "prompts of IPython": ["In [1]: " + F.replace("\n    ", "\n   ...:     ")],
    "Windows ends of lines": [F.replace("\n", "\r\n") + "\r\n!ls \\\r\n -l\r\n"],
    "%%bash beside it": ["%%bash\nif ls; then rm x; fi", F],
    "if True": ["if True:\n    " + INDENTED],
    "if __name__": ["if __name__ == '__main__':\n    " + INDENTED],
    "on a GPU or not": [
        "import torch",
        "if torch.cuda.device_count() > 99:\n    def f(p, b, n): return 0\nelse:\n    " + INDENTED,
    ],
    "try": ["try:\n    import a_package_that_is_not_there as c\nexcept ImportError:\n    c = None\n" + F.replace(
        "return", "assert c is None\n    return"
    )],
    "with": ["import contextlib\nwith contextlib.suppress(OSError):\n    " + INDENTED],
    "for": ["for k in (1, 2):\n    " + INDENTED.replace(" 2 ", " k ")],
    "while": ["while True:\n    " + INDENTED + "\n    break"],
    "match": ["match 3:\n    case 3:\n        " + F.replace("\n    ", "\n            ")],
    "a table that a loop fills": ["TABLE = {}\n" + FILL, WITH],
    "a table that a loop fills below": [WITH, "TABLE = {}", FILL, CHECK],
    "a list that grows": ["TABLE = [0]\nfor n in range(1, 65):\n    TABLE.append(2 * (n - 1) / n)", WITH],
    "a computed table": ["TABLE = " + BY_N, WITH],
    "a table of a function": ["def made():\n    return " + BY_N, "TABLE = made()", WITH],
    "global": ["def setup():\n    global TABLE\n    TABLE = " + BY_N, "setup()", WITH],
    "timed": ["%time TABLE = " + BY_N, WITH],
    "augmented": ["X = 1\nX += 1", F.replace(" 2 ", " X ")],
    "walrus": ["print(X := 2)", F.replace(" 2 ", " X ")],
    "unpacking": ["a, (b2, *c) = 1, (2, 3)", F.replace(" 2 ", " b2 ")],
    "a star import": ["from math import *", F.replace(" 2 ", " int(sqrt(4)) ")],
    "a partial": ["import functools\ndef g(k, p, b, n): return p * b * k * (n - 1) / n", "f = functools.partial(g, 2)"],
    "a decorator as a call": ["import torch", F, "f = torch.no_grad()(f)"],
    "a decorator": ["import torch", "@torch.no_grad()\n" + F],
    "a closure": ["def make(k):\n    return lambda p, b, n: p * b * k * (n - 1) / n", "f = make(2)"],
    "an attribute": ["class C: pass\nC.k = 2", F.replace(" 2 ", " C.k ")],
    "a patched method": ["class C: k = None", "def two(self): return 2\nC.k = two", F.replace(" 2 ", " C().k() ")],
    "setattr": ["class C: k = 0\nsetattr(C, 'k', len('ab'))", F.replace(" 2 ", " C.k ")],
    "an object": ["class C:\n    def __call__(self, p, b, n): return p * b * 2 * (n - 1) / n", "f = C()"],
    "a helper that a later exercise defines again": [
        "def k(): return 2", F.replace(" 2 ", " k() "), CHECK, "def k(): return 7\nX = k()",
    ],
    "a helper below its check": [F.replace(" 2 ", " k() "), CHECK, "def k(): return 2"],
    "an answer below its check": ["def f(p, b, n):\n    raise NotImplementedError", CHECK, F],
    "tests that fail and never end": ["import sys", F, "f(0, 0, 0)\nsys.exit()", "while True: pass", "f().no"],
    "an import that fails": ["import a_package_that_is_not_there", F],
    "cells of the first format": [F],
}  # fmt: skip


def of_format_3(path):
    """As Jupyter saved it before 2015."""
    cells = json.loads(open(path).read())["cells"]
    cells = [{"cell_type": "code", "input": cell["source"].splitlines(keepends=True)} for cell in cells]
    open(path, "w").write(json.dumps({"nbformat": 3, "worksheets": [{"cells": cells}], "metadata": {}}))
    return path


def test_a_right_answer_in_an_odd_form_is_read(tmp_path):
    """All of them are judged in the same ranks."""
    paths = {name: notebook(tmp_path, *cells) for name, cells in READ.items()}
    of_format_3(paths["cells of the first format"])
    answers = {name: Answer(read_notebook(path), "f") for name, path in paths.items()}
    for name, answer in answers.items():
        assert answer.notebook.names["f"] and not answer.notebook.notes, name
        assert answer.load()(8, 1, 4) == 12, name
    judged = judge(BYTES, [*answers.values()], seed=1)
    assert [name for name, (case,) in zip(answers, judged, strict=True) if case.status != "PASS"] == []


# What is not read is said, with its cell.
NOT_DEFINED = {
    "a Markdown cell": ([text("markdown", F)], "f is in 0.ipynb, cell 1, which is a Markdown cell: change its type to"),
    "a raw cell": ([text("raw", "x = 1\n" + F)], "f is in 0.ipynb, cell 1, which is a raw cell"),
    "a cell of no type": ([text(None, F)], "f is in 0.ipynb, cell 1, which is no cell of code"),
    "%%bash": (["x = 1", "%%bash\n" + F], "f is in 0.ipynb, code cell 2, which begins with %%bash: its names are lost"),
    "%%timeit": (["%%timeit\n" + F], "code cell 1, which begins with %%timeit"),
    "%%writefile": (["%%writefile f.py\n" + F], "code cell 1, which begins with %%writefile"),
    "a cell that does not parse": (["!ls", F + "x = = 3"], "f is in 0.ipynb, code cell 2, which does not parse"),
    "an import of a file": (["import torch\nfrom answers import f"], "f is imported in 0.ipynb, code cell 1, line 2"),
    "an import of all": (["from answers import *"], "may be in answers, of which 0.ipynb, code cell 1, line 1 imports"),
    "%run": (["%run -m lib.train", "x = 1\n%run answers.py"], "may be in answers.py, which 0.ipynb, code cell 2 runs"),
    "nowhere": (["x = 1\nfrom torch import *"], ""),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_DEFINED)
def test_a_definition_that_is_not_read_is_said(name, tmp_path):
    cells, words = NOT_DEFINED[name]
    path = tmp_path / "0.ipynb"
    cells = [cell if isinstance(cell, dict) else text("code", cell) for cell in cells]
    path.write_text(json.dumps({"cells": cells}))
    said = read_notebook(str(path)).where_else("f")
    assert words in said and bool(said) == bool(words), said


LOST = {
    "a command": (["x = 1\nTABLE = !ls", WITH], "TABLE comes from 0.ipynb, code cell 1, line 2, which is not run: no"),
    "a magic": (["TABLE = %env", WITH], "TABLE comes from 0.ipynb, code cell 1, line 1, which is not run"),
    "ranks": (["from lib.launch import run\nTABLE = run(3, len)", WITH], "TABLE comes from 0.ipynb, code cell 1, line"),
    "input": (["TABLE = {}\nTABLE[4] = int(input())", WITH], "TABLE comes from 0.ipynb, code cell 1, line 2"),
    "await": (
        ["async def g(): return {}", "TABLE = await g()", WITH],
        "TABLE comes from 0.ipynb, code cell 2, line 1, which is not run",
    ),
    "a function that fills": (
        ["TABLE = {}\ndef fill(t): t[4] = 1.5", "fill(TABLE)", WITH],
        "TABLE is passed to fill in 0.ipynb, code cell 2, line 1, which is not run.",
    ),
    "a package": (
        ["from a_package_that_is_not_there import TABLE", WITH],
        "TABLE is imported in 0.ipynb, code cell 1, line 1, which fails here: is that package installed",
    ),
    "a definition": (["@nobody\ndef TABLE(): pass", WITH], "TABLE comes from 0.ipynb, code cell 1, line 2, which"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOST)
def test_what_an_answer_needs_and_is_not_there_is_said(name, tmp_path):
    cells, words = LOST[name]
    read = read_notebook(notebook(tmp_path, *cells))
    with pytest.raises((NameError, KeyError)) as raised:
        Answer(read, "f").load()(8, 1, 4)
    assert words in read.reason("f", f"NameError: {raised.value}"), read.reason("f", f"NameError: {raised.value}")
    assert Answer(read, "g").notebook.reason("g") == "", "another answer needs nothing of it"


def test_a_line_that_an_answer_needs_and_that_fails_is_said(tmp_path):
    """It would leave the table empty, and the answer wrong without an error."""
    read = read_notebook(notebook(tmp_path, "TABLE = {}\nfor line in open('/nowhere'):\n    TABLE[4] = 1", WITH))
    with pytest.raises(
        NameError, match="f needs a line that fails .*: 0.ipynb, code cell 1, line 2: FileNotFoundError"
    ):
        Answer(read, "f").load()
    assert not read.define()[1] and not read.define("len")[1], "for other answers it is not run"


# ---- what a check names ---------------------------------------------------------------------------------------------

CHECKS = {
    "check('03.9', f)": ("03.9", "f", ""),
    "check('3.9', f)": ("03.9", "f", ""),
    "EX = '03.9'\ncheck(EX, f, row='b')": ("03.9", "f", "B"),
    "check(exercise='03.9', answer=f)": ("03.9", "f", ""),
    "course.check.check('03.9', C.f)": ("03.9", "C.f", ""),
    "check('03.9', lambda p, b, n: f(p, b, n))": ("03.9", "lambda p, b, n: f(p, b, n)", ""),
    "check('03.9', partial(f), 7, 2)": ("03.9", "partial(f)", ""),
    "if True:\n    %time check('03.9', f)": ("03.9", "f", ""),
}


@pytest.mark.parametrize("call", CHECKS)
def test_what_a_check_names_is_an_answer(call, tmp_path):
    imports = "import course.check\nfrom course.check import check\nfrom functools import partial\n"
    read = read_notebook(notebook(tmp_path, imports + F + "class C: f = staticmethod(f)\n" + call))
    assert read.checks == (CHECKS[call],)
    assert Answer(read, read.checked("03.9")).load()(8, 1, 4) == 12


def test_a_check_that_names_nothing(tmp_path):
    deep = "(" * 90 + "f" + ".x" * 3000 + ")" * 90
    read = read_notebook(
        notebook(tmp_path, F, "check(mine, f)\ncheck('03.9')\ncheck(3, f)", f"check('03.9', {deep})")
    )
    assert [asked for asked, *_ in read.checks] in (["3"], ["3", "03.9"]) and read.checked("03.1") == ""
    assert read_notebook(notebook(tmp_path, "check('03.9', nobody)")).checked("03.9") == ""


def test_the_terminal_says_where_an_answer_is_and_what_it_lacks(tmp_path, capsys, own_progress):
    """Each check is judged with what is above it."""
    again = "def k(): return {}\n" + F.replace(" 2 ", " k() ")
    cells = [again.format(2), CHECK, again.format(3).replace("def f", "def g"), "check('03.9', g)"]
    cells += ["TABLE = !ls\n" + WITH.replace("def f", "def h"), "check('3.9', lambda p, b, n: h(p, b, n))"]
    cells += ["%%bash\ndef mine(): pass", "check('03.9', mine)"]
    assert main([notebook(tmp_path, *cells), "03.9"]) == 1
    first, second, third, fourth = re.split(r"^(?=PASS|FAIL)", capsys.readouterr().out, flags=re.MULTILINE)[1:]
    assert first.startswith("PASS") and second.startswith("FAIL")
    assert "TABLE comes from 0.ipynb, code cell 5, line 1, which is not run" in third
    assert "mine is not defined. mine is in 0.ipynb, code cell 7, which begins with %%bash" in fourth


# ---- IPython's commands ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", READ)
def test_commands_are_those_that_ipython_finds(name):
    """The same names from its translation, and each of our lines where it was."""
    transformer = pytest.importorskip("IPython.core.inputtransformer2").TransformerManager()

    def given(tree):
        return {one for node in tree.body for one in Statement("", node).gives}

    for cell in (cell.replace("\r\n", "\n") for cell in READ[name]):
        theirs = transformer.transform_cell(cell)
        if not theirs.startswith("get_ipython().run_cell_magic"):
            timed = {"TABLE"} if "%time TABLE" in cell else {"x"} if "%time x" in cell else set()
            assert given(parse(cell)) - timed == given(ast.parse(theirs)) - timed, theirs
        assert as_python(cell).count("\n") in (cell.count("\n"), 0)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "hostile",
    ["!ls\n" * 10**5, "'''\n" * 99_999, "'''\"" * 99_999 + "\n!", '\\"""' * 99_999, "(\n" * 10**5, " " * 10**6 + "!ls",
     "\n" * 10**5 + "?", " \n" * 10**5 + " x ?", "x ?\n" * 10**5, ">>> x\n" * 10**5, "%x" + "\\\n" * 10**5,
     " x\n" * 10**5, "%time " * 10**5, "=" * 10**6 + "!"],
    ids=lambda hostile: ascii(hostile[:5]),
)  # fmt: skip
def test_text_that_is_made_to_be_slow_is_not(hostile):
    """IPython's own translation takes 24 s for 300 commands."""
    assert as_python(hostile).count("\n") == hostile.count("\n")


# ---- files ----------------------------------------------------------------------------------------------------------

BOOK = json.dumps({"cells": [text("code", F + "# für Ω".replace("Ω", "€"))], "metadata": {}}, ensure_ascii=False)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_each_encoding_of_unicode_is_read(encoding, tmp_path):
    (tmp_path / "a.ipynb").write_bytes(BOOK.encode(encoding))
    read = read_notebook(str(tmp_path / "a.ipynb"))
    assert read.notes == () and "€" in read.cells[0][1] and Answer(read, "f").load()(8, 1, 4) == 12


def test_latin_1_is_read_and_said(tmp_path):
    (tmp_path / "a.ipynb").write_bytes(BOOK.encode("cp1252"))
    read = read_notebook(str(tmp_path / "a.ipynb"))
    assert "für €" in read.cells[0][1] and Answer(read, "f").load()(8, 1, 4) == 12
    (note,) = read.notes
    assert note.startswith("a.ipynb is not in UTF-8, but perhaps in Latin-1") and "such as ü" in note
    assert note.endswith("Save it as UTF-8")


NO_NOTEBOOK = {
    b"": "it is empty: open it in JupyterLab",
    b" \n": "it is empty",
    b"PK\3\4aaaa": "it is a zip: unzip it",
    b"%PDF-1.7": "it is a PDF: from the notebook itself, open it",
    b"<!DOCTYPE html>\n<html>": "it is a web page",
    b"# %%\nimport torch\n": "it is a Python script: jupytext --to ipynb FILE",
    b'"""Doc."""\nimport torch\n': "it is a Python script",
    b"#!/usr/bin/env python\n# coding: utf-8\n\n# In[1]:\n\ndef f(): pass": "it is a Python script",
    b'{"cells": [\n<<<<<<< HEAD\n]}': "it has the marks of a merge",
    b'{"cells": [': "not JSON$",
    b'{"a": 1}': "no list of cells$",
    b'{"worksheets": [3, {"cells": 4}], "x": NaN}': "",
}


@pytest.mark.parametrize("raw", NO_NOTEBOOK)
def test_what_a_file_is_and_the_way_out_is_said(raw, tmp_path):
    path = tmp_path / "a.ipynb"
    path.write_bytes(raw)
    if words := NO_NOTEBOOK[raw]:
        with pytest.raises(NotebookError, match=words):
            read_cells(str(path))
    else:
        assert read_cells(str(path)) == ([], {}, [])


def test_cells_that_a_merge_has_twice_are_said(tmp_path):
    path = tmp_path / "a.ipynb"
    path.write_text(
        '{"cells": [{"cell_type": "code", "source": "x = 1"}], "cells": [{"cell_type": "code", "source": ""}]}'
    )
    assert read_cells(str(path))[2] == ["a.ipynb has cells twice in one place, as after a merge: the last one counts"]
