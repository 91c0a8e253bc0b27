"""What the tests of releases share, as it takes seconds."""

import zipfile

import pytest

from course.release.__main__ import main
from tests.course.homework import ROOT


@pytest.fixture(scope="session")
def released(tmp_path_factory):
    """Folders of all homeworks, the zips beside what is in them."""
    out = tmp_path_factory.mktemp("release")
    assert main([*map(str, sorted(ROOT.glob("course/assignments/*.json"))), "--out", str(out)]) == 0
    for path in out.glob("*/*.zip"):
        with zipfile.ZipFile(path) as archive:
            archive.extractall(path.with_suffix(""))
    return out
