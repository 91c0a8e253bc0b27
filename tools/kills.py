"""Judges the programs that each exercise lists, and keeps what came out in book/kill_table.json, for the book's table.

    python tools/kills.py            # what `make kills` runs: exercises that changed since they were last tried
    python tools/kills.py 03 09.1    # these chapters and exercises, changed or not: make kills ID="03 09.1"
    python tools/kills.py --check    # runs nothing; fails naming the exercises that changed

An exercise has changed if its file has changed, but for comments, docstrings and line breaks, or a file that judges
it. Two are tried at a time; beside a FAIL whose seconds are measured, nothing else runs.
"""

import argparse
import ast
import hashlib
import json
import os
import platform
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

from execute_chapters import Turns
from set_repository import ROOT
from tqdm import tqdm

KEPT = ROOT / "book" / "kill_table.json"
EXERCISES = ROOT / "course" / "exercises"
JUDGE = ROOT / "course" / "check" / "tried.py"
AT_A_TIME = 2
IMPORTED = re.compile(r"^from (course\.\S+) import", re.MULTILINE)


def sources() -> dict[str, str]:
    """Exercise id -> a digest of the files of course/check that decide what comes out."""
    found = {}
    for path in sorted(EXERCISES.glob("ch*/e*.py")):
        chapter, number = re.match(r"e(\d+)_(\d+)_", path.stem).groups()
        texts, left = {}, [path, JUDGE]
        while left:
            if (one := left.pop()) not in texts:
                texts[one] = one.read_text(encoding="utf-8")
                left += [ROOT / f"{name.replace('.', '/')}.py" for name in IMPORTED.findall(texts[one])]
        trees = {one: program(text) for one, text in texts.items()}
        said = "".join(f"{one.relative_to(ROOT)}\n{trees[one]}" for one in sorted(trees))
        found[f"{chapter}.{number}"] = hashlib.sha256(said.encode()).hexdigest()[:16]
    return found


def program(text: str) -> str:
    """The text without comments, line breaks and docstrings, on which nothing depends that is tried."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return repr(_plain(tree))


def _plain(node: object) -> object:
    """A tree as lists, the same in each version of Python.

    `ast.dump` prints the empty fields that a version has; 3.12.1 ends `f"{x:{n}}"` with an empty string inside.
    """
    if isinstance(node, ast.JoinedStr):
        values = [one for one in node.values if not (isinstance(one, ast.Constant) and one.value == "")]
        node = ast.JoinedStr(values)
    if isinstance(node, list):
        return [_plain(one) for one in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    return [type(node).__name__, *((name, _plain(x)) for name, x in ast.iter_fields(node) if x not in (None, []))]


def kept() -> dict[str, dict]:
    return json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}


def keep(rows: dict[str, dict]) -> None:
    KEPT.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n", encoding="utf-8")


def try_one(exercise_id: str, turns: Turns) -> tuple[dict, list[str]]:
    """The numbers of an exercise, and a line for each program whose verdict is not the one that it must get.

    Of mutants that pass, the line is what its list of equivalent ones would say.
    """
    from course.check import find, new_seed  # `--check` needs no torch
    from course.check.judge import judge
    from course.check.tried import too_few, try_mutants, try_right, try_slips, try_wrong

    exercise, seed = find(exercise_id), new_seed()
    if lines := too_few(exercise):
        return dict.fromkeys(("right", "wrong", "slips", "mutants"), 0), lines
    turns.begin(exercise_id, alone=False)
    try:
        rows = exercise.rows.values()
        tried = {
            "right": [program for one in rows for program in try_right(one, seed)],
            "wrong": [program for one in rows for program in try_wrong(one, seed)],
            "slips": try_slips(exercise, seed),
            "mutants": try_mutants(exercise, seed),
        }
    finally:
        turns.end(exercise_id, alone=False)
    turns.begin(exercise_id, alone=True)
    try:
        began_s = time.monotonic()
        judge(exercise, [exercise.mistakes[-1].wrong], seed)  # after all others, and so the longest
        fail_s = time.monotonic() - began_s
    finally:
        turns.end(exercise_id, alone=True)
    numbers = {name: sum(as_it_must for as_it_must, _ in programs) for name, programs in tried.items()}
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    lines = [
        f"{exercise_id}, {name} program {k}, seed={seed}: {cases}"
        for name, programs in tried.items()
        for k, (as_it_must, cases) in enumerate(programs)
        if not as_it_must
    ]
    equivalent = len(exercise.equivalent)
    numbers["mutants"] -= equivalent
    return numbers | {"equivalent": equivalent, "fail_s": round(fail_s, 1), "machine": machine}, lines


def of(exercise_id: str) -> set[str]:
    """The names under which an exercise is asked for: its own and its chapter's."""
    return {exercise_id, exercise_id.partition(".")[0]}


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="run nothing, fail if an exercise changed")
    parser.add_argument("only", nargs="*", help="chapters or exercises, such as 03 and 09.1")
    given = parser.parse_args(args)
    check, only = given.check, tuple(given.only)
    now, old = sources(), kept()
    for name in only:
        if not any(name in of(i) for i in now):
            print(f"{name} is no exercise and no chapter of course/exercises, such as 03.1 and 03", file=sys.stderr)
            return 2
    changed = [i for i in now if i not in old or old[i]["source"] != now[i]]
    if check:
        if stale := changed + [i for i in old if i not in now]:
            print(f"book/kill_table.json is not of today's exercises {', '.join(stale)}: make kills", file=sys.stderr)
        return bool(stale)
    asked = [i for i in now if {*only} & of(i)] if only else changed
    rows = {i: old[i] for i in now if i in old and i not in asked}
    turns, faults = Turns(), []
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        under_way = {pool.submit(try_one, i, turns): i for i in asked}
        for done in tqdm(as_completed(under_way), total=len(asked), unit="exercise", disable=None):
            row, lines = done.result()
            faults += lines
            counts = ", ".join(f"{row[name]} {name}" for name in ("right", "wrong", "slips", "mutants"))
            tqdm.write(f"{under_way[done]}: {counts}: {'as they must' if not lines else 'not all as they must'}")
            if not lines:
                rows[under_way[done]] = {"source": now[under_way[done]], **row}
                keep(rows)
    keep(rows)
    of_today = sum(row["source"] == now[i] for i, row in rows.items())
    print(*faults, f"{KEPT.relative_to(ROOT)} has {of_today} of {len(now)} exercises as they are now", sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
