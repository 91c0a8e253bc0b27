"""All exercises, by their id: each file `course/exercises/chNN/eNN_k_name.py` has one, called EXERCISE."""

from __future__ import annotations

import importlib
from pathlib import Path

import course.exercises
from course.check.exercise import Exercise

_FILES = (path for folder in course.exercises.__path__ for path in Path(folder).glob("ch*/e*.py"))
_OWN = (importlib.import_module(f"course.exercises.{path.parent.name}.{path.stem}") for path in _FILES)
_ALL = (module.EXERCISE for module in _OWN)
EXERCISES: dict[str, Exercise] = {e.id: e for e in sorted(_ALL, key=lambda e: e.id)}
