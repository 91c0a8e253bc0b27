"""Nothing outlives a jail, no right program is in it, and what a hidden case shows is told to nobody."""

import ast
import ctypes
import io
import json
import multiprocessing
import os
import pickle
import sys
import types
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import indent

import cloudpickle
import pytest
import torch

import lib
from course.check.catalogue import EXERCISES
from course.check.running import NoAnswer, as_compared, for_ranks
from course.grade import jail, sight
from course.grade.__main__ import USER
from course.grade.assignment import read_assignment
from course.grade.feedback import feedback
from course.grade.grading import grade
from course.grade.jail import OPEN_TO_ALL, User, processes_of
from course.grade.reports import gradescope
from course.grade.submissions import find_submissions
from lib.runtime.calls import listeners
from tests.course.homework import SETUP, Course, alone, an_answer, needs_jail

CHECKERS = ("course.exercises.", "course.practise.")
NAME = "left-behind"
CALLS = "import ctypes, mmap, os, socket, time\nsystem = ctypes.CDLL(None, use_errno=True)\n"
# Name -> code that leaves something behind; `made` is whether the system let it.
LEAVES = {
    "shared memory": "made = any(system.shmget(k, 2**20, 0o1666) >= 0 for k in range(1, 83))",
    "semaphores": "made = system.semget(7, 1, 0o1666) >= 0",
    "a queue": "made = system.msgget(7, 0o1666) >= 0",
    "a queue of POSIX": f"made = system.syscall(240, b'{NAME}', 0o102, 0o666, None) >= 0",
    "a key of the user": f"made = system.syscall(248, b'user', b'{NAME}', b'x', 1, -4) >= 0",
    "a key of the session": f"made = system.syscall(248, b'user', b'{NAME}', b'x', 1, -3) >= 0",
    "a memory file": "made = system.memfd_create(b'x', 0) >= 0",
    "a mount": "made = not (system.unshare(0x10020000) or system.mount(b'none', b'/tmp', b'tmpfs', 0, None))",
    "files": "made = []\n"
    f"for place in {(*OPEN_TO_ALL, '/run', '/etc', '/')}:\n"
    f"    try: made += [open(place + '/{NAME}', 'w').write('x') and place]\n"
    "    except OSError: pass",
    "an abstract socket": f"s = socket.socket(socket.AF_UNIX)\ns.bind('\\0{NAME}%d' % group.rank)\nmade = []",
    "processes": "made = []\nfor _ in range(9):\n    if os.fork() == 0:\n"
    "        os.setsid()\n        if os.fork() == 0: time.sleep(99)\n        os._exit(0)",
}


def graded(folder, *cells, user=None, cases=""):
    """The grade of one submission, in a jail of its own; `cases` replaces fields of the exercise."""
    course = Course(folder, exercises={"03.1": 3})
    course.hands_in("ann", SETUP, *cells)
    course.has_cases(f"replace(find('03.1'), {cases})")
    asked = read_assignment(str(folder / "hw.json"), str(folder / "cases.py"))
    (one,) = find_submissions(str(course.submissions))
    return asked, grade(asked, one, User(user), b"x")


def find_key(uid):
    sight.become(uid)
    if ctypes.CDLL(None).syscall(250, 10, -4, b"user", NAME.encode(), 0) < 0:
        raise KeyError(NAME)


def of_user(uid):
    """What a user has that no process needs: System V, keys, files."""
    found = []
    for kind in ("shm", "sem", "msg"):
        head, *rows = Path("/proc/sysvipc", kind).read_text().splitlines()
        found += [f"{kind} {row}" for row in rows if int(row.split()[head.split().index("uid")]) == uid]
    found += ["a key"] * sight.in_child(lambda: find_key(uid))
    for place in filter(os.path.isdir, (*OPEN_TO_ALL, "/run", "/")):
        found += [entry.path for entry in os.scandir(place) if entry.stat(follow_symlinks=False).st_uid == uid]
    return found


@alone
@needs_jail
def test_nothing_outlives_a_jail(tmp_path):
    code = CALLS + "all_made = {}\n"
    for name, lines in LEAVES.items():
        code += f"try:\n{indent(lines, '    ')}\nexcept BaseException as error: made = repr(error)\n"
        code += f"all_made[{name!r}] = made\n"
    _, given = graded(tmp_path, an_answer(f"{code}raise ValueError(all_made)"), user=USER)
    said = given["results"][0]["hint"].rpartition("ValueError: ")[2]
    made = {name: what for name, what in ast.literal_eval(said).items() if what}
    assert made == {"files": [place for place in OPEN_TO_ALL if os.path.isdir(place)]}, "of the jail's own memory"
    assert not processes_of(USER) and not of_user(USER)
    assert NAME not in Path("/proc/net/unix").read_text()
    queue = ctypes.CDLL(None).syscall(240, NAME.encode(), 0, 0, None)
    assert queue < 0 or os.uname().machine != "x86_64"


def closed_while_it_counts(folder):
    """A warden whose grader closes the leash between its two looks, with too much memory in the jail."""
    grader, leash = multiprocessing.Pipe()
    conn, theirs = multiprocessing.Pipe()
    jail._held_bytes = lambda uid: grader.close() or 2 * jail.MOST_MEMORY_BYTES
    jail._warden(theirs, leash, USER, folder)


@alone
@needs_jail
def test_nothing_outlives_a_jail_that_is_closed_while_its_memory_is_counted(tmp_path):
    warden = multiprocessing.get_context("fork").Process(target=closed_while_it_counts, args=(str(tmp_path),))
    warden.start()
    warden.join(30)
    assert warden.exitcode == 0 and not processes_of(USER)


@alone
@needs_jail
@pytest.mark.slow("a jail whose processes take memory")
def test_memory_that_processes_share_is_the_submissions(tmp_path):
    code = (
        f"{CALLS}if group.rank == 0:\n    m = mmap.mmap(-1, 2**30)\n    m[::4096] = bytes(2**18)\n"
        "    for _ in range(9):\n        if os.fork() == 0: m[::4096]; time.sleep(99)\ntime.sleep(99)"
    )
    _, given = graded(tmp_path, an_answer(code), user=USER, cases="ranks=(3,), timeout_s=60")
    assert "took more than 8 GiB of memory" in given["results"][0]["hint"], given
    assert not processes_of(USER)


LOOKS = """import gc, importlib
from pathlib import Path
book, seen = Path(comm.__file__).parents[1], []
for name in ("e03_1_average_gradients", "e04_1_shard", "e04_2_zero1_step"):
    try: seen.append(vars(importlib.import_module(f"course.exercises.ch{name[1:3]}.{name}")))
    except ImportError: pass
unseen = ("course.exercises.", "course.practise.", "course.check.catalogue")
seen += [name for name in sys.modules if name.startswith(unseen)]
seen += [x.__qualname__ for x in gc.get_objects() if type(x).__name__ == "function"
         and "course/exercises" in x.__code__.co_filename and x.__name__ != "body"]
rooms = [f"course/{name}" for name in ("exercises", "practise", "assignments")]
places = [*rooms, "solutions", "chapters", "exercises", "book", ".git"]
for folder in places:
    if (book / folder).is_dir(): seen += os.listdir(book / folder)
raise ValueError(seen)"""


@alone
@needs_jail
def test_no_right_program_is_in_a_jail(tmp_path, monkeypatch):
    book = Path(lib.__file__).parents[1]
    monkeypatch.setattr(sys, "path", [*sys.path, str(book / "book"), str(book / "solutions")])  # as tests add to it
    _, given = graded(tmp_path, an_answer(LOOKS), user=USER)
    assert given["results"][0]["hint"].endswith("ValueError: []"), given["results"][0]["hint"]


class Closed(pickle.Unpickler):
    def find_class(self, module, name):
        assert not module.startswith(CHECKERS), f"{name} of {module} would be imported"
        return super().find_class(module, name)


def named_by(function):
    """The globals that a function names, also inside."""
    codes = [function.__code__]
    for code in codes:
        codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
        yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)


def reached(body):
    """All functions that are sent with a body."""
    found, left = {}, [body]
    while left:
        x = left.pop()
        if id(x) in found:
            continue
        found[id(x)] = x
        if isinstance(x, partial):
            left += [x.func, *x.args]
        if isinstance(x, types.FunctionType):
            left += [cell.cell_contents for cell in x.__closure__ or ()] + [*(x.__defaults__ or ())]
            left += named_by(x) if x.__module__.startswith(CHECKERS) else ()
        elif hasattr(x, "cache_info"):
            left.append(x.__wrapped__)
        elif isinstance(x, type) and x.__module__.startswith(CHECKERS):
            left += vars(x).values()
        elif isinstance(x, (dict, list, tuple)):
            left += x.values() if isinstance(x, dict) else x
    return [x for x in found.values() if isinstance(x, types.FunctionType)]


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES)
def test_what_is_sent_of_an_exercise_has_no_right_program(exercise):
    """It can be read where there is no file of exercises, and hears what the library hears."""
    for one in exercise.rows.values():
        sent = cloudpickle.dumps((one.body, one.inputs(torch.Generator().manual_seed(1), one.ranks[0])))
        Closed(io.BytesIO(sent)).load()
        copied = [x for f in reached(one.body) if f.__module__.startswith(CHECKERS) for x in named_by(f)]
        assert not [x for x in copied if x is listeners], "name it by its module: nobody speaks to a copy"
        right = {getattr(getattr(program, "func", program), "__code__", None) for program in one.right}
        assert not [f.__qualname__ for f in reached(one.body) if f.__code__ in right]


REMEMBERS = """def average_gradients(params, group):
    kept = os.path.join(os.environ["HOME"], "kept")
    if group.size == 2 and group.rank == 0:
        open(kept, "w").write("SECRET")
        print("SECRET", flush=True)
        raise ValueError("SECRET " + str(params[0]))
    comm.all_reduce(torch.zeros(1), group)
    raise ValueError(open(kept).read() if os.path.exists(kept) else "nothing")"""


def test_nothing_of_a_hidden_case_is_told(tmp_path):
    """Neither by the next case, which could read what the first one kept, nor by an error that the grader repeats."""
    asked, given = graded(tmp_path, REMEMBERS, cases="ranks=(2, 3, 4)")
    assert [(r["hidden"], "SECRET" in r["hint"]) for r in given["results"]] == [(True, True), *[(False, False)] * 2]
    told = feedback(asked, given, 0, {}) + json.dumps(gradescope(given))
    assert "ValueError: nothing" in told and "[ ] a hidden case" in told
    assert "SECRET" not in told and "2 ranks" not in told and "execution_time" not in told


def test_an_error_that_a_students_code_wrote_is_for_the_teacher(tmp_path, monkeypatch):
    """A jail can say that the machine is at fault, in words of its own."""
    fault = NoAnswer("FAIL", "SECRET", fault=True)
    monkeypatch.setattr("course.grade.jail.unpack", lambda *args: [fault])
    asked, given = graded(tmp_path, an_answer("pass"))
    assert given["digest"] is None and "SECRET" in given["notes"][0]
    told = feedback(asked, given, 0, {}) + json.dumps(gradescope(given))
    assert "could not be graded" in told and "SECRET" not in told


def test_what_decides_is_not_where_the_answer_is():
    """`compared` has what is right, and runs in the process of the judge."""
    exercise = EXERCISES["14.6"]
    sent = {f.__qualname__ for f in reached(exercise.body)}
    assert "regrets" in {f.__qualname__ for f in reached(exercise.compared)} - sent


@pytest.mark.parametrize("exercise_id", [i for i, e in EXERCISES.items() if e.withheld])
def test_right_numbers_are_withheld(exercise_id):
    exercise = EXERCISES[exercise_id]
    inputs = exercise.inputs(torch.Generator().manual_seed(1), exercise.ranks[0])
    assert all({*exercise.withheld} <= given.keys() for given in inputs)
    assert not any({*exercise.withheld} & given.keys() for given in for_ranks(exercise, inputs))
    assert not {"known", "right"} & {name for given in for_ranks(exercise, inputs) for name in given}


def test_what_cannot_be_decided_is_no_answer():
    exercise = replace(EXERCISES["14.6"], ranks=(1,))
    inputs = exercise.inputs(torch.Generator().manual_seed(1), 1)
    for forged in ({}, {"what was returned": 3}, {"what was returned": [[[1], 2, 3]] * 3}):
        (got,) = as_compared(exercise, [[forged]], inputs)
        assert isinstance(got, NoAnswer) and got.hint.startswith("The result of your function cannot be read")
