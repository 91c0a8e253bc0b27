"""Which notebooks get a note for a person: those with code that no answer needs, and no others."""

import time
from pathlib import Path

import pytest

from course.check.source import Notebook, read_notebook
from course.grade.assignment import read_assignment
from course.grade.review import suspicious
from course.release.notebooks import homework

ROOT = Path(__file__).parents[2]
SETUP = (ROOT / "tools" / "setup_cell.py").read_text()
IMPORTS = "import torch\n\nfrom course.check import check, progress\nfrom lib import comm\nfrom lib.launch import run"


def notes(*cells):
    return suspicious(Notebook("a.ipynb", tuple(("a cell", cell) for cell in (SETUP, IMPORTS, *cells))))


@pytest.mark.parametrize(
    ("code", "note"),
    [
        ("from course.check import check, find\nplan = find('08.5').right[0]", "course"),
        ("from course.check import find", "course"),
        ("from course.check import check, progress, find", "course"),
        ("from course.check import check as c", "course"),
        ("    from course.check.catalogue import EXERCISES", "course"),
        ("from course import check as c", "course"),
        ("from course import (\n    check,\n)", "course"),
        ("from course import \\\n    check", "course"),
        ("import os, course", "course"),
        ("import course.exercises.ch03", "course"),
        ("import course.check as c", "course"),
        ("getattr(course, 'che' + 'ck')", "course"),
        ("open('course/exercises/ch03/e03_1_average_gradients.py')", "course"),
        ("Path('course', 'check')", "course"),
        ("import course.grade", "course"),
        ("from lib.runtime import calls\ncalls.listeners.clear()", "lib.runtime"),
        ("from lib import runtime", "lib.runtime"),
        ("check.__globals__['find']", "what functions are made of"),
        ("().__class__.__base__.__subclasses__()", "what functions are made of"),
        ("import builtins", "what functions are made of"),
        ("sys.modules['course.check'].find", "modules"),
        ("from sys import modules", "modules"),
        ("import sys as s", "modules"),
        ("import importlib", "modules"),
        ("importlib.import_module('course.' + 'check')", "modules"),
        ("importlib.util.find_spec('course.check')", "modules"),
        ("import inspect\ninspect.stack()", "frames"),
        ("import os, inspect", "frames"),
        ("from inspect import stack", "frames"),
        ("e.__traceback__.tb_frame.f_back", "frames"),
        ("exec('x')", "code from a string"),
        ("f = __import__", "code from a string"),
        ("subprocess.run(['cat', 'x'])", "processes"),
        ("import multiprocessing as mp", "processes"),
        ("getattr(comm, 'cal' + 'ls')", "an attribute whose name is computed"),
        ("getattr(x, f'{a}{b}')", "an attribute whose name is computed"),
        ("name = 'reg' + 'rets'\ngetattr(x, name, None)", "an attribute whose name is computed"),
        ("operator.attrgetter('sta' + 'rts')(x)", "an attribute whose name is computed"),
        ("x.__dict__['a']", "what functions are made of"),
        ("vars(comm)['calls']", "what functions are made of"),
        ("comm.calls.listeners[-1]", "what functions are made of"),
        ("comm._all_reduce(x)", "messages that are not counted"),
        ("dist.distributed_c10d._get_default_store().set('a', b'1')", "messages that are not counted"),
        ("dist.FileStore('a', 2)", "messages that are not counted"),
        ("torch.ops.c10d.allreduce_([x])", "messages that are not counted"),
        ("torch.save(x, f'/dev/shm/{rank}')", "files"),
        ("x.numpy().tofile('a')", "files"),
        ("np.memmap('a')", "files"),
        ("open('a', 'wb')", "files"),
        ("os.open('a', 1)", "files"),
        ("Path('a').write_text('1')", "files"),
        ("torch.from_file('a', shared=True)", "files"),
        ("from multiprocessing import shared_memory", "files"),
        ("x.share_memory_()", "files"),
        ("import logging.handlers", "sockets"),
    ],
)
def test_a_person_looks(code, note):
    assert note in notes(code)


@pytest.mark.parametrize(
    "code",
    [
        "from course.check import check",
        "from course.check.bill import bill",
        "from course.check.refusals import broken_layouts",
        "model.eval()\ntorch.compile(model)\nre.compile('x')",
        "from lib import comm\nfrom lib.mesh import Group",
        "list(model.modules())",
        "# the runtime of lib; I inspect the gradients",
        'check("03.1", average_gradients, points=2)',
        "getattr(module, 'weight')\nsetattr(module, name, value)\nhasattr(x, name)",
        "store = {}\nstore['a'] = dist.get_rank()\ndist.group.WORLD",
        "restored = model.load_state_dict(saved)\nx.saved()",
    ],
)
def test_nobody_looks(code):
    assert notes(code) == []


@pytest.mark.parametrize("path", sorted(ROOT.glob("solutions/*.ipynb")), ids=lambda path: path.stem[:2])
def test_no_solution_of_the_book_gets_a_note(path):
    assert suspicious(read_notebook(str(path))) == []


@pytest.mark.parametrize("path", sorted(ROOT.glob("course/assignments/*.json")), ids=lambda path: path.stem)
@pytest.mark.parametrize("kind", ["exercises", "solutions"])
def test_what_the_book_gives_out_and_its_own_answers_get_no_note(path, kind, tmp_path):
    import nbformat

    for name, book in homework(ROOT, kind, read_assignment(str(path))).items():
        nbformat.write(book, tmp_path / name)
        assert suspicious(read_notebook(str(tmp_path / name))) == [], name


LONG = [
    "import ",
    "lib ",
    "lib.",
    "from lib import ",
    "from lib import (",
    "course ",
    "course.",
    "from course import (",
]
LONG += ["sys.", "inspect ", "importlib ", " ", "\n", "("]


@pytest.mark.alone("it measures time")
@pytest.mark.parametrize("text", LONG)
def test_a_long_line_takes_no_time(text):
    """A notebook may have a hundred times as much."""
    began_s = time.process_time()
    notes(text * (2**18 // len(text)))
    assert time.process_time() - began_s < 5
