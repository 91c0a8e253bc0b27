"""All exercises, by their id: each file of `course.exercises` whose name begins with e and a digit has one."""

from __future__ import annotations

import importlib
import pkgutil
import re

import course.exercises
from course.check.exercise import Exercise

_NAMES = (module.name for module in pkgutil.iter_modules(course.exercises.__path__))
_OWN = (importlib.import_module(f"course.exercises.{name}") for name in _NAMES if re.match(r"e\d", name))
_ALL = (module.EXERCISE for module in _OWN)
EXERCISES: dict[str, Exercise] = {e.id: e for e in sorted(_ALL, key=lambda e: e.id)}
