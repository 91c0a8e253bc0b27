"""The same verdicts in a terminal: `python -m lib.check exercises/03_data_parallelism.ipynb`.

Exit code: 0 if everything passes, 1 if something fails or is not done, 2 if a file cannot be read.
"""

from __future__ import annotations

import argparse
import sys

from lib.check import PASS, missing, progress, verdict
from lib.check.source import NotebookError, read


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lib.check", description="Check the exercises of saved notebooks."
    )
    parser.add_argument("notebooks", nargs="+", metavar="NOTEBOOK")
    args = parser.parse_args(argv)
    statuses = []
    try:
        for path in args.notebooks:
            names, checks, notes = read(path)
            if not checks:
                raise NotebookError(f'{path} has no exercise in it: no cell calls check("...", ...)')
            for note in notes:
                print(f"note: {note}")
            for exercise_id, name in checks:
                text, status = _one(exercise_id, name, names)
                print(text, flush=True)
                statuses.append(status)
    except ValueError as error:
        print(f"lib.check: {error}", file=sys.stderr)
        return 2
    print()
    progress()
    return 0 if all(status == PASS for status in statuses) else 1


def _one(exercise_id: str, name: str, names: dict) -> tuple[str, str]:
    return verdict(exercise_id, names[name]) if callable(names.get(name)) else missing(exercise_id, name)


if __name__ == "__main__":
    sys.exit(main())
