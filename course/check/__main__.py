"""The same verdicts in a terminal: `.venv/bin/python -m course.check exercises/03_data_parallelism.ipynb`.

With the number of an exercise behind the notebook it checks this one; `--hint` says what to do about a mistake; with
`--watch` it checks again at each save. Without a notebook it prints the progress in all chapters.

All exercises of a chapter count as soon as a notebook has one of them: an exercise that no cell checks gets 0 points.
In a homework's notebook, the exercises of its handout count.

Exit code: 0 if everything passes, 1 if something fails or is not done, 2 if a file cannot be read.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
from collections.abc import Collection, Iterator, Sequence

from course.check import PASS, find, forget, in_row, missing, progress, record, total, verdict
from course.check.catalogue import EXERCISES
from course.check.cells import NotebookError
from course.check.running import FAIL, TODO
from course.check.source import Answer, read_notebook

_NUMBER = re.compile(r"\d{1,2}\.\d+")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m course.check", description="Check the exercises of saved notebooks."
    )
    parser.add_argument("given", nargs="*", metavar="NOTEBOOK", help="a notebook, or the number of an exercise in it")
    parser.add_argument("--hint", action="store_true", help="say what to do about a mistake")
    parser.add_argument("--watch", action="store_true", help="check again at each save")
    args = parser.parse_args(argv)
    only = {f"{i:0>2}.{k}" for i, _, k in (one.partition(".") for one in args.given if _NUMBER.fullmatch(one))}
    notebooks = [one for one in args.given if not _NUMBER.fullmatch(one)]
    if only and not notebooks:
        parser.error(f"in which notebook is {', '.join(sorted(only))}? python -m course.check NOTEBOOK {min(only)}")
    if not notebooks:
        print(record.all_chapters())
        return 0
    if not args.watch:
        return _all(notebooks, only, args.hint)
    with contextlib.suppress(KeyboardInterrupt):
        for saved in _saves(notebooks):
            print(f"\n---- {time.strftime('%H:%M:%S')}", flush=True)
            _all(saved, only, args.hint)
            print("Waiting for the next save; Ctrl-C ends this.", flush=True)
    return 0


def _saves(paths: Sequence[str]) -> Iterator[list[str]]:
    """First all notebooks, then, forever, those that were saved since the last look."""
    seen: dict[str, float] = {}
    while True:
        times = {path: _saved(path) for path in paths}
        if changed := [path for path in paths if times[path] != seen.get(path)]:
            seen = times
            yield changed
        time.sleep(0.3)


def _saved(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:  # an editor may remove it while it saves
        return 0.0


def _all(notebooks: Sequence[str], only: Collection[str] = (), told: bool = False) -> int:
    """Check all exercises of the notebooks, or these only."""
    forget()
    found: dict[str, str] = {}  # exercise -> status
    asked: dict[str, float | None] = {}  # exercise -> points; None: its points in the book
    try:
        for path in notebooks:
            notebook = read_notebook(path)
            if not notebook.checks:
                raise NotebookError(f'{path} has no exercise: no cell calls check("...", ...)')
            for note in [*notebook.notes, *notebook.define()[1]]:
                print(f"note: {note}")
            for exercise_id, name, row in notebook.checks:
                if only and exercise_id not in only:
                    continue
                text, status = _one(exercise_id, Answer(notebook, name), notebook.asked.get(exercise_id), row, told)
                print(text, flush=True)
                found[exercise_id] = status
            chapters = {exercise_id[:2] for exercise_id, *_ in notebook.checks}
            asked |= notebook.asked or {i: None for i in EXERCISES if i[:2] in chapters}
        if only:
            if lost := [i for i in sorted(only) if i not in found]:
                there = ", ".join(i for path in notebooks for i, *_ in read_notebook(path).checks)
                raise NotebookError(f"no cell checks {', '.join(lost)}; there are {there}")
            return _code(found)
        for exercise_id in [i for i in EXERCISES if i in asked and i not in found]:
            text, found[exercise_id] = missing(exercise_id, points=asked[exercise_id])
            print(text)
    except ValueError as error:
        print(f"course.check: {error}", file=sys.stderr)
        return 2
    print()
    known = {i: points for i, points in asked.items() if i in EXERCISES}
    if None in known.values():
        print(total(), record.advice(record.kept()), sep="\n")
    else:
        progress(known)
    return _code(found)


def _code(found: dict[str, str]) -> int:
    return 0 if all(status == PASS for status in found.values()) else 1


def _one(exercise_id: str, answer: Answer, points: float | None, row: str, told: bool) -> tuple[str, str]:
    try:
        in_row(find(exercise_id), row)
    except ValueError as error:
        return missing(exercise_id, f"{error}.", points)
    try:
        function = answer.load()
    except NameError as error:
        text, status = missing(exercise_id, f"{error}. {answer.notebook.where_else(answer.name)}".strip(), points)
    else:
        text, status = verdict(exercise_id, function, points=points, row=row, told=told, asked_by="--hint")
    why = answer.notebook.reason(answer.name, text) if status == FAIL else ""
    if status == TODO:
        why = answer.notebook.where_else(answer.name)
    return f"{text}\n{why}" if why else text, status


if __name__ == "__main__":
    sys.exit(main())
