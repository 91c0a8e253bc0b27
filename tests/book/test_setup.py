"""`make` installs by content, and never into what another checkout made."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDS = "requirements.txt", "constraints.txt", "pyproject.toml", "tools/ipython_kernel_config.py", "tools/setup.sh"
# In place of Python: it says what it is asked, and makes a python of an environment.
PYTHON = """#!/bin/sh
echo "python $*" >>"{log}"
[ "$1 $2" != "-m venv" ] || { mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; }
"""


@pytest.fixture
def checkout(tmp_path):
    """Makes a checkout; it has a command `setup`, which returns what Python was asked, and the error."""
    log = tmp_path / "log"
    python = tmp_path / "python"
    python.write_text(PYTHON.replace("{log}", str(log)))
    python.chmod(0o755)

    class Checkout:
        def __init__(self, name):
            self.folder = tmp_path / name
            for path in NEEDS:
                (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, self.folder / path)

        def setup(self, venv=".venv", ends_early=False):
            log.write_text("")
            command = ["tools/setup.sh", venv, python]
            done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True)
            assert ends_early or (done.returncode == 0) == (done.stderr == ""), done
            return log.read_text(), done.stderr

    return Checkout


def test_it_installs_once_and_again_when_the_content_changes(checkout):
    mine = checkout("mine")
    asked, _ = mine.setup()
    assert "-m venv .venv" in asked and "pip install --no-deps torch==" in asked and "--no-deps -e ." in asked
    for path in NEEDS:
        (mine.folder / path).touch()
    assert mine.setup() == ("", ""), "newer files with the same content"
    (mine.folder / "requirements.txt").write_text("numpy\n")
    asked, _ = mine.setup()
    assert "pip install -q -r requirements.txt" in asked and "-m venv" not in asked
    mine.folder.rename(mine.folder.parent / "moved")
    mine.folder = mine.folder.parent / "moved"
    (mine.folder / "requirements.txt").write_text("torch\n")
    assert "--no-deps -e ." in mine.setup()[0]


@pytest.mark.parametrize("by", ["a link", "its path"])
def test_nothing_is_written_into_the_environment_of_another_checkout(by, checkout):
    first, second = checkout("first"), checkout("second")
    first.setup()
    venv = ".venv"
    if by == "a link":
        (second.folder / ".venv").symlink_to(first.folder / ".venv")
    else:
        venv = str(first.folder / ".venv")
    assert second.setup(venv) == ("", ""), "it has all that is needed"
    (second.folder / "constraints.txt").write_text("torch==2.0.0\n")
    asked, error = second.setup(venv)
    assert asked == "" and f"was made by {first.folder}" in error and "make VENV=.venv-mine" in error
    assert first.setup() == ("", "")
    assert "-m venv .venv-mine" in second.setup(".venv-mine")[0]


def test_an_environment_without_a_stamp(checkout):
    """One that was interrupted is completed, wherever it lies; one elsewhere may be anybody's."""
    mine, other = checkout("mine"), checkout("other")
    mine.setup()
    (mine.folder / ".venv" / ".ready").unlink()
    (other.folder / ".venv").symlink_to(mine.folder / ".venv")
    assert "says of no checkout that it made it" in other.setup()[1]
    assert "--no-deps -e ." in mine.setup()[0]
    far = str(mine.folder.parent / "far")
    (mine.folder / "tools" / "ipython_kernel_config.py").rename(mine.folder / "aside")
    (mine.folder / "tools" / "ipython_kernel_config.py").mkdir()  # which cannot be copied as a file: setup ends there
    assert "ipython_kernel_config" in mine.setup(far, ends_early=True)[1]
    (mine.folder / "tools" / "ipython_kernel_config.py").rmdir()
    (mine.folder / "aside").rename(mine.folder / "tools" / "ipython_kernel_config.py")
    assert "--no-deps -e ." in mine.setup(far)[0] and mine.setup(far) == ("", "")
