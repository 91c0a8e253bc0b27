"""What the tests of checks share: a record and a session of their own, and an exercise that is in no chapter."""

import pytest

from course import check as checks
from course.check import record
from course.check.catalogue import EXERCISES
from tests.course.bytes_sent import BYTES


@pytest.fixture
def own_progress(monkeypatch, tmp_path):
    monkeypatch.setattr(record, "place", lambda: tmp_path / "progress.json")
    monkeypatch.setattr(checks, "_session", {})
    monkeypatch.setitem(EXERCISES, BYTES.id, BYTES)
    for variable in ("CHECK_STRICT", "NBGRADER_EXECUTION"):
        monkeypatch.delenv(variable, raising=False)
