"""Lists of mistakes: each piece is replaced where it is, once, and what is written wrongly is said."""

import ast
import pickle

import nbformat
import pytest

from course.check.catalogue import EXERCISES
from course.check.edits import Edited, exercise, read_mistakes
from course.check.judge import judge
from course.check.table import findings
from tests.book.test_repository import ROOT

GREETINGS = {"hello": "Hello"}


def greeting(name):
    return f"{GREETINGS['hello']}, {called(name)}!"


def called(name):
    return name.title()


def shouts(name):
    return greeting(name).upper()


LISTED = """
name.title() => name
    It keeps the name.

shouts
    It shouts, without end,
    in two lines.
        Say it in a lower voice,
        or not at all.
in end, start:
Hello => Bye
or {called(name)} => {name}
hangs
    It says goodbye.
in all:
=> {name[0]}
    It is short.
=> {name[1]}
returns result + name
    It says both.
"""


def test_a_list_is_read():
    kept, shouted, first, second, last, both = read_mistakes(
        LISTED.replace("Hello => Bye", "['hello'] => .get('bye', 'Bye')"), greeting, called
    )
    assert [m.wrong.load()("ada") for m in (kept, shouted, first, second)] == [
        "Hello, ada!",
        "HELLO, ADA!",
        "Bye, Ada!",
        "Hello, ada!",
    ]
    assert shouted.hint == "It shouts, without end, in two lines."
    assert (shouted.repair, kept.repair) == ("Say it in a lower voice, or not at all.", "")
    assert shouted.words == f"{shouted.hint} {shouted.repair}" and kept.words == "It keeps the name."
    assert [m.about for m in (kept, shouted, first, second)] == [("",), ("",), ("end", "start"), ("end", "start")]
    assert last.about == ("",) and last.wrong.load()("ada") == "Hello, a!"
    assert both.wrong.load()("ada") == "Hello, d!ada"
    assert [m.hangs for m in (first, second)] == [False, True] and first.hint == second.hint
    assert pickle.loads(pickle.dumps(kept.wrong)).load()("ada") == "Hello, ada!", "it travels as its words"
    assert greeting("ada") == "Hello, Ada!"


def test_words_on_the_line_of_a_program_are_for_its_hint_alone():
    listed = "in end: name.title() => name\n    It keeps the name.\nshouts\n    It shouts."
    kept, shouted = read_mistakes(listed, greeting, called)
    assert (kept.about, shouted.about) == (("end",), ("",)) and kept.wrong.load()("ada") == "Hello, ada!"


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        ("name.tilte() => name\n    A hint.", "name.tilte.. => name: the piece is 0 times in the program"),
        ("name => nom\n    A hint.", "name => nom: the piece is 4 times"),
        ("=> nom\n    A hint.", "=> nom: the piece is not given, nor in an edit above"),
        ("returns result\nreturns name\n    A hint.", "a hint needs edits, or one expression"),
        ("returns result\nshouts\n    A hint.", "a hint needs edits, or one expression"),
        ("called(name) => name\nA hint.", "has no hint below it"),
        ("called(name) => name\n  A hint.", "no space begins a program, 4 a hint"),
        ("called(name) => name\n        Only what to do.", "no space begins a program, 4 a hint"),
        ("shouts\n    A hint.\n        To do.\n    More hint.", "no space begins a program, 4 a hint"),
        ("shouts\n    A hint.\n      Halfway.", "no space begins a program, 4 a hint"),
        ("    A hint.", "above the hint 'A hint.' a program is missing"),
        ("or\ncalled(name) => name\n    A hint.", "a program is missing"),
        ("called(name) => name\nor\n    A hint.", "a program is missing"),
        ("hangs\n    A hint.", "a hint needs edits, or one expression"),
        ("in start:\n    A hint.", "a hint needs edits, or one expression"),
        ("shouts\ncalled => name\n    A hint.", "a hint needs edits, or one expression"),
        ("shouts\ngreeting\n    A hint.", "a hint needs edits, or one expression"),
    ],
)
def test_what_is_written_wrongly_is_said_at_once(listed, words):
    with pytest.raises(ValueError, match=words):
        read_mistakes(listed, greeting, called)


def test_an_exercise_is_made_of_the_names_of_its_file():
    names = {
        "__doc__": "77.2: greet.",
        "inputs": lambda generator, n: [{"cases": [("ada",)]}],
        "ALSO_RIGHT": "name.title() => name.capitalize()\n    By another function.",
        "MISTAKES": "['hello'] => .get('bye', 'Bye')\n    It says goodbye.",
    }
    one = exercise(names, points=1, right=(greeting,), edited=(greeting, called), same_as=greeting)
    assert (one.id, one.title, one.ranks) == ("77.2", "greeting", (1,))
    bye = one.mistakes[0].wrong
    found = [cases[0] for cases in judge(one, [*one.right, bye], 1)]
    assert [case.status for case in found] == ["PASS", "PASS", "FAIL"] and found[2].hint == "It says goodbye."
    names |= {"FACTS": {"all": 1}, "body": lambda answer, group, given: {"y": answer("ada"), "all": 1}}
    names["reference"] = lambda given: [{"y": "Hello, Ada!"}]
    of_file = exercise(names, points=1, right=(greeting,), edited=(greeting, called))
    assert of_file.ranks == (3, 4) and [*of_file.reference([{}])[0].items()] == [("y", "Hello, Ada!"), ("all", 1)]


def test_a_table_names_each_wrong_entry():
    right = {"A": (1, "f0", None), "B": (2, "b1", 0.5)}
    listed = """
    A rank: 0 | 3
        rank {} waits, {0, 1}.
            Look past {}.
    A lost: 4
    or
    B call: "c"
        not that.
    """.replace("\n    ", "\n")
    exercise = findings("77.1", "find", "Run", ("rank", "call", "lost"), right, listed)
    assert [m.hint for m in exercise.mistakes] == [
        "Run A: rank 0 waits, {0, 1}.",
        "Run A: rank 3 waits, {0, 1}.",
        "Run A: not that.",
        "Run B: not that.",
    ]
    assert [m.repair for m in exercise.mistakes] == ["Look past 0.", "Look past 3.", "", ""]
    short = [lambda: None, lambda: [(1, "F0", None)], lambda: [(1, "F0", None), (2, "b1")]]
    found = [
        cases[0] for cases in judge(exercise, [*exercise.right, *(m.wrong for m in exercise.mistakes), *short], 1)
    ]
    assert [case.status for case in found] == ["PASS"] * 2 + ["FAIL"] * 7
    assert [" ".join(case.hint.split()) for case in found[2:6]] == [m.hint for m in exercise.mistakes]
    assert "2 results" in found[6].hint and "2 results" in found[7].hint and "Run B" in found[8].hint


def test_a_table_of_one_column_is_a_list_of_entries():
    exercise = findings("77.1", "find", "Run", (), {"A": "f0", "B": 2}, 'A: "b0" | "b1"\n    not {}.')
    assert [m.hint for m in exercise.mistakes] == ["Run A: not b0.", "Run A: not b1."]
    answers = [*exercise.right, lambda: [["F0"], [2]], *(m.wrong for m in exercise.mistakes), lambda: ["f0", 3]]
    found = [cases[0] for cases in judge(exercise, answers, 1)]
    assert [case.status for case in found] == ["PASS"] * 3 + ["FAIL"] * 3
    assert [case.hint for case in found[3:5]] == [m.hint for m in exercise.mistakes] and "Run B" in found[5].hint


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        ("A rank: 1\n    A hint.", "is no mistake"),
        ("A size: 2\n    A hint.", "is no mistake"),
        ("A: 2\n    A hint.", "is no mistake"),
        ("A rank: 2\nA rank: 3\n    A hint.", "write `or` above it"),
    ],
)
def test_a_table_says_what_is_no_mistake(listed, words):
    with pytest.raises(ValueError, match=words):
        findings("77.1", "find", "Run", ("rank",), {"A": (1,)}, listed)


# ---- the exercises --------------------------------------------------------------------------------------------------


TEXTS = [e for e in EXERCISES.values() if any(isinstance(m.wrong, Edited) and m.wrong.text for m in e.mistakes)]


@pytest.mark.parametrize("exercise", TEXTS, ids=lambda e: e.id)
def test_each_edited_program_can_be_loaded(exercise):
    for mistake in exercise.mistakes:
        if isinstance(mistake.wrong, Edited):
            assert callable(mistake.wrong.load()), mistake.hint


def without_words(definition):
    """The tree of a function or class, without docstrings."""
    for node in ast.walk(definition):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(definition)


def until_return(program):
    """Without what stands behind a return: the program that a learner is to correct."""
    ends = [i for i, statement in enumerate(getattr(program, "body", ())) if isinstance(statement, ast.Return)]
    if ends:
        del program.body[ends[0] + 1 :]
    return program


@pytest.mark.parametrize("exercise", TEXTS, ids=lambda e: e.id)
def test_the_first_right_program_is_the_solution(exercise):
    (path,) = ROOT.glob(f"solutions/{exercise.chapter}_*.ipynb")
    code = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    first = next(m.wrong for m in exercise.mistakes if isinstance(m.wrong, Edited) and m.wrong.text)
    module = ast.parse((ROOT / f"{first.module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    shown, judged = (
        [without_words(until_return(d)) for d in tree.body if getattr(d, "name", "") == exercise.title]
        for tree in (ast.parse("\n".join(code)), module)
    )
    assert len(shown) == 1 and shown == judged
