"""The same verdicts in a terminal: `.venv/bin/python -m lib.check exercises/03_data_parallelism.ipynb`.

All exercises of a chapter count as soon as a notebook has one of them: one that no cell checks gets 0 of its points.

Exit code: 0 if everything passes, 1 if something fails or is not done, 2 if a file cannot be read.
"""

from __future__ import annotations

import argparse
import sys

from lib.check import PASS, missing, progress, verdict
from lib.check.catalogue import EXERCISES
from lib.check.source import NotebookError, read_notebook


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lib.check", description="Check the exercises of saved notebooks."
    )
    parser.add_argument("notebooks", nargs="+", metavar="NOTEBOOK")
    args = parser.parse_args(argv)
    found: dict[str, str] = {}  # exercise -> what became of it
    try:
        for path in args.notebooks:
            names, checks, notes = read_notebook(path)
            if not checks:
                raise NotebookError(f'{path} has no exercise in it: no cell calls check("...", ...)')
            for note in notes:
                print(f"note: {note}")
            for exercise_id, name in checks:
                text, status = _one(exercise_id, name, names)
                print(text, flush=True)
                found[exercise_id] = status
        chapters = {_chapter(exercise_id) for exercise_id in found}
        for exercise in [e for i, e in EXERCISES.items() if _chapter(i) in chapters and i not in found]:
            why = f'No cell calls check("{exercise.id}", {exercise.title}).'
            text, found[exercise.id] = missing(exercise.id, why)
            print(text)
    except ValueError as error:
        print(f"lib.check: {error}", file=sys.stderr)
        return 2
    print()
    progress()
    return 0 if all(status == PASS for status in found.values()) else 1


def _one(exercise_id: str, name: str, names: dict) -> tuple[str, str]:
    if callable(names.get(name)):
        return verdict(exercise_id, names[name])
    return missing(exercise_id, f"{name} is not defined.")


def _chapter(exercise_id: str) -> str:
    return exercise_id.partition(".")[0]


if __name__ == "__main__":
    sys.exit(main())
