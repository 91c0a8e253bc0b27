"""A reader's progress: a file with the best points of each exercise, which may be copied to a new machine.

The file is for the reader, and not for a grade: every program can write into it.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from course.check.exercise import Exercise

FILE = ".progress.json"
_BOOK = Path(__file__).resolve().parents[2]
_DRIVE = Path("/content/drive/MyDrive")  # of Colab, if the reader mounted it: it outlives the session
WIDTH = 20  # of a bar
_met: dict[str, set[str]] = {}  # exercise -> mistakes, where the file cannot be written


def place() -> Path:
    """The path of the record."""
    return _DRIVE / f"parallel-by-hand{FILE}" if _DRIVE.is_dir() else _BOOK / FILE


def _found() -> dict[Path, dict]:
    """The record, and also that from before the Drive was mounted; a file that cannot be read stays unchanged."""
    paths = [place()]
    if place().parent == _DRIVE:
        paths.append(_BOOK / FILE)
    records: dict[Path, dict] = {}
    for path in paths:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            entries = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            records[path] = {i: entry for i, entry in entries.items() if _part(entry) >= 0}
    return records


def _best(*records: dict) -> dict[str, Any]:
    """The best entry of each exercise; of two that are equal, the later one."""
    entries = [item for record in records for item in record.items()]
    entries.sort(key=lambda item: _part(item[1]))
    return dict(entries)  # of several for an exercise, the last


def keep(exercise: Exercise, points: float, met: Iterable[str] = ()) -> None:
    """Store the points, unless the record holds a larger fraction, and the mistakes that an answer had.

    No verdict depends on the record.
    """
    mistakes = _met.setdefault(exercise.id, met_in(exercise))
    mistakes |= set(met)
    new = {"points": points, "max": exercise.points, "when": time.strftime("%Y-%m-%d %H:%M")}
    records = _found()
    best = _best(*records.values(), {exercise.id: new})  # a homework has different points
    if mistakes:
        best[exercise.id] = best[exercise.id] | {"met": sorted(mistakes)}
    for path in records:  # all of them: the next session may not mount the Drive
        with contextlib.suppress(OSError):
            path.write_text(json.dumps(best, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def kept() -> dict[str, float]:
    """Exercise -> fraction of its points, 0 to 1, of all that were checked."""
    return {i: _part(entry) for i, entry in _best(*_found().values()).items()}


def met_in(exercise: Exercise) -> set[str]:
    """The mistakes, by their sentences, that answers to this exercise had: in this process, or by the record."""
    mistakes = {*_met.get(exercise.id, ())}
    for record in _found().values():
        entry = record.get(exercise.id)
        met = entry.get("met", []) if entry else []
        if isinstance(met, list):  # the file may have been changed by hand
            mistakes |= {mistake for mistake in met if type(mistake) is str}
    return mistakes


def _part(entry: Any) -> float:
    part = float(entry["points"]) / max(float(entry["max"]), 1e-9)
    return min(max(part, 0.0), 1.0) if math.isfinite(part) else 0.0


def next_to_do(done: dict[str, float]) -> Exercise | None:
    """The first exercise that is not done; a chapter with a checked exercise comes first."""
    from course.check.catalogue import EXERCISES  # a check imports one exercise, and not all

    begun = {i[:2] for i in done}  # chapters
    left = [i for i in EXERCISES if done.get(i, 0) < 1]
    of_begun = [i for i in left if i[:2] in begun]
    first, *_ = [*of_begun, *left, None]
    return EXERCISES[first] if first else None


def all_chapters() -> str:
    """A line for each chapter, the sum, and the next exercise; and what cannot be loaded."""
    from course.check.catalogue import EXERCISES

    done, lines = kept(), []
    able, broken = EXERCISES.able()
    for chapter, exercises in groupby(able, key=lambda e: e.chapter):
        lines.append(_line(f"chapter {int(chapter)}", [*exercises], done))
    lines.append(_line("all", able, done))
    return "\n".join([*lines, *broken, advice(done)])


def advice(done: dict[str, float]) -> str:
    """A sentence that names the next exercise."""
    from course.check.catalogue import BrokenExercise

    try:
        exercise = next_to_do(done)
    except BrokenExercise as error:
        return f"Next to do: {error}"
    if exercise is None:
        return "All exercises are done."
    notebook = next(_BOOK.glob(f"exercises/{exercise.id[:2]}_*.ipynb"), Path(f"exercises/{exercise.id[:2]}"))
    return f"Next to do: {exercise.id} {exercise.title}, in exercises/{notebook.name}"


def _line(name: str, exercises: list[Exercise], done: dict[str, float]) -> str:
    most = sum(e.points for e in exercises)
    points = sum(done.get(e.id, 0) * e.points for e in exercises)
    bar = "█" * round(WIDTH * points / most)
    return f"{name:<11}{bar:·<{WIDTH}}  {round(points, 2):g}/{most:g} points"
