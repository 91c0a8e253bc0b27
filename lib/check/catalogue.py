"""All exercises, by their id: each file of `lib.check.exercises` whose name begins with e and a digit has one."""

from __future__ import annotations

import importlib
import pkgutil
import re

import lib.check.exercises
from lib.check.exercise import Exercise

_NAMES = (module.name for module in pkgutil.iter_modules(lib.check.exercises.__path__))
_OWN = (importlib.import_module(f"lib.check.exercises.{name}") for name in _NAMES if re.match(r"e\d", name))
_ALL = (module.EXERCISE for module in _OWN)
EXERCISES: dict[str, Exercise] = {e.id: e for e in sorted(_ALL, key=lambda e: e.id)}
