"""A second try for an answer whose time was over: with more time, while no other jail runs.

The problem: on a busy machine a right answer can be late, and "is there an endless loop?" would be wrong about it. The
idea: what is lost by time alone is tried once more, alone, and a person is told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from course.check.compare import Data
from course.check.exercise import Exercise
from course.check.running import NoAnswer
from course.grade.jail import Jail, User

FACTOR = 3  # of the exercise's time, in the second try

_machine = threading.Condition()
_running = 0  # jails


@contextmanager
def _beside_others() -> Iterator[None]:
    global _running
    with _machine:
        _running += 1
    try:
        yield
    finally:
        with _machine:
            _running -= 1
            _machine.notify_all()


@contextmanager
def _alone() -> Iterator[None]:
    with _machine:  # held: no other jail begins
        _machine.wait_for(lambda: not _running)
        yield


class Patient:
    """The jails of one answer. `notes` says, for a person, what needed or lost a second try."""

    def __init__(self, user: User) -> None:
        self.notes: list[str] = []
        self._user, self._is_lost = user, False  # a loop is endless in each case: one second try is enough

    @contextmanager
    def jail(self) -> Iterator[Callable]:
        """A jail for some of the exercise's cases; yields what runs answers in it, as `Jail.returned` does."""
        jail = Jail(self._user)

        def returned(exercise: Exercise, answers: Sequence[Callable], inputs: list[Data]) -> list:
            with _beside_others():
                outcomes = jail.returned(exercise, answers, inputs)
            is_slow = any(isinstance(got, NoAnswer) and got.slow for got in outcomes)
            return self._again(exercise, answers, inputs) if is_slow and not self._is_lost else outcomes

        try:
            yield returned
        finally:
            jail.close()

    def _again(self, exercise: Exercise, answers: Sequence[Callable], inputs: list[Data]) -> list:
        longer = replace(exercise, timeout_s=FACTOR * exercise.timeout_s)
        with _alone():
            jail = Jail(self._user)
            try:
                outcomes = jail.returned(longer, answers, inputs)
            finally:
                jail.close()
        self._is_lost = any(isinstance(got, NoAnswer) and got.slow for got in outcomes)
        found = "this verdict counts"
        if self._is_lost:
            found = "and had none again"
        tried = f"it was tried again alone, with {longer.timeout_s:g} s, {found}"
        note = f"had no result within {exercise.timeout_s:g} s; {tried}"
        self.notes += [note] * (note not in self.notes)
        return outcomes
