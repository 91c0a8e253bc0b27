"""One right answer, judged in a jail before anybody's.

The problem: where a jail cannot work, as where Python is reached by a link that it does not have, each answer ends the
process that waits for it, and each student gets 0 points. The idea: an answer that is known to be right takes the same
way first. If it does not pass, nothing is graded.
"""

from __future__ import annotations

from typing import Any

import torch

from course.check.compare import Data
from course.check.exercise import Exercise
from course.check.judge import PASS, judge
from course.check.source import Answer, Notebook
from course.grade.jail import Jail, JailError, User

CELL = """import os
import torch
from lib import comm
from course.check import compare


def total(x, group):
    for module in (os, torch, comm, compare):
        open(module.__file__).close()
    return comm.all_reduce(x, group)
"""  # what was imported before can be called from memory: only its files tell whether Python can read there


def _inputs(generator: torch.Generator, ranks: int) -> list[Data]:
    return [{"x": torch.randn(3, generator=generator, dtype=torch.float64)} for _ in range(ranks)]


def _body(answer: Any, group: Any, given: Data) -> Data:
    return {"total": answer(given["x"], group)}


def _reference(given: list[Data]) -> list[Data]:
    total = sum(of_rank["x"] for of_rank in given)
    return [{"total": total}] * len(given)


TRIAL = Exercise("trial", "total", 1, _body, _inputs, (), reference=_reference, ranks=(2,), timeout_s=60)


def must_pass(user: User) -> None:
    """Judge a right answer as this user.

    Raises:
        JailError: it does not pass.
    """
    notebook = Notebook("a right answer", (("a right answer, code cell 1", CELL),), names={"total": True})
    jail = Jail(user)
    try:
        ((verdict,),) = judge(TRIAL, [Answer(notebook, "total")], 0, jail.returned)
    finally:
        jail.close()
    if verdict.status != PASS:
        raise JailError(
            f"nothing was graded, because a right answer fails here: {verdict.hint.strip()} Students' code must be "
            "able to read Python and the book: install both in /opt, without links, and grade from there"
        )
