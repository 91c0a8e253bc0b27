"""All exercises, by their id: each file `course/exercises/chNN/eNN_k_name.py` has one, called EXERCISE.

A file is imported when its exercise is asked for. So a check loads one file, and a file that is broken, because
somebody is at work on it, stops its own check and no other.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator, MutableMapping
from pathlib import Path

import course.exercises
from course.check.exercise import Exercise


class BrokenExercise(ValueError):
    """The file of an exercise cannot be imported."""


class Catalogue(MutableMapping[str, Exercise]):
    """Exercise by id, in the order of ids. Ids are known by the names of the files, without an import.

    Raises:
        BrokenExercise: on a lookup, if the file of this exercise cannot be imported.
    """

    def __init__(self) -> None:
        files = (path for folder in course.exercises.__path__ for path in Path(folder).glob("ch*/e*.py"))
        self._files = {_id_of(path): path for path in files}
        self._loaded: dict[str, Exercise] = {}

    def __getitem__(self, exercise_id: str) -> Exercise:
        if exercise_id not in self._loaded:
            self._loaded[exercise_id] = _load(self._files[exercise_id])
        return self._loaded[exercise_id]

    def __setitem__(self, exercise_id: str, exercise: Exercise) -> None:
        self._loaded[exercise_id] = exercise

    def __delitem__(self, exercise_id: str) -> None:
        if exercise_id not in self:
            raise KeyError(exercise_id)
        self._files.pop(exercise_id, None)
        self._loaded.pop(exercise_id, None)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._files.keys() | self._loaded.keys()))

    def __len__(self) -> int:
        return len(self._files.keys() | self._loaded.keys())

    def __contains__(self, exercise_id: object) -> bool:
        return exercise_id in self._loaded or exercise_id in self._files

    def able(self, chapters: Collection[str] | None = None) -> tuple[list[Exercise], list[str]]:
        """The exercises of these chapters, or all, that can be loaded; and of each that cannot, why."""
        loaded, broken = [], []
        for exercise_id in [i for i in self if chapters is None or i[:2] in chapters]:
            try:
                loaded.append(self[exercise_id])
            except BrokenExercise as error:
                broken.append(str(error))
        return loaded, broken


def _id_of(path: Path) -> str:
    """Of `e05_2_recomputed_unit.py` it is 05.2."""
    chapter, number, _ = path.stem.removeprefix("e").split("_", 2)
    return f"{chapter}.{number}"


def _load(path: Path) -> Exercise:
    try:
        return importlib.import_module(f"course.exercises.{path.parent.name}.{path.stem}").EXERCISE
    except Exception as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        name = f"course/exercises/{path.parent.name}/{path.name}"
        raise BrokenExercise(
            f"exercise {_id_of(path)} cannot be loaded: {name}{line}: {type(error).__name__}: "
            f"{getattr(error, 'msg', error)}. Mend this file; all other exercises can be checked"
        ) from error


EXERCISES = Catalogue()
