"""All exercises, by their id: each file of `lib.check.exercises` has one."""

from __future__ import annotations

import importlib
import pkgutil

import lib.check.exercises
from lib.check.exercise import Exercise

_NAMES = (module.name for module in pkgutil.iter_modules(lib.check.exercises.__path__))
_ALL = (importlib.import_module(f"lib.check.exercises.{name}").EXERCISE for name in _NAMES)
EXERCISES: dict[str, Exercise] = {e.id: e for e in sorted(_ALL, key=lambda e: e.id)}
