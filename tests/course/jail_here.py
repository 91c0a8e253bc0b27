"""Whether this machine lets the grader keep students' code apart; tests that need it say why they are skipped."""

import os

import pytest

from course.grade import sight
from course.grade.__main__ import USER


def _why_not() -> str:
    if os.geteuid() != 0:
        return "only root can give students' code a user of its own"
    path = sight.unreadable(USER)
    return f"students' code cannot read {path}, and no view of its own is allowed here" if path else ""


def _new_view() -> None:
    if sight._libc.unshare(sight._NEW_VIEW):
        raise OSError("not allowed")


WHY_NOT = _why_not()
needs_jail = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
needs_view = pytest.mark.skipif(
    os.geteuid() != 0 or not sight.in_child(_new_view),
    reason="the system allows no view of the disk of one's own",
)
