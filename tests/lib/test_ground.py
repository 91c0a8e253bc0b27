"""The ground, on which ranks start, talk and are watched, stands alone: no model, no page, nothing else of `lib`."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "book" / "ranks.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", PAGE, re.DOTALL)
COPIED = [path for line in re.findall(r"^cp -r (.*) mine/lib/$", PAGE, re.MULTILINE) for path in shlex.split(line)]


@pytest.fixture
def alone(tmp_path):
    """Runs Python in a folder with what the page says to copy."""
    (tmp_path / "lib").mkdir()
    for path in COPIED:
        source = ROOT / path
        copy = shutil.copytree if source.is_dir() else shutil.copy2
        copy(source, tmp_path / "lib" / source.name)

    def python(*args):
        variables = os.environ | {"PYTHONPATH": str(tmp_path)}
        pipes = {"capture_output": True, "text": True, "timeout": 120}
        return subprocess.run([sys.executable, *args], cwd=tmp_path, env=variables, **pipes)

    python.folder = tmp_path
    return python


def timeless(text):
    return re.sub(r"\b\d+\.\d s\b", "0.0 s", text)


def test_the_ground_stands_alone(alone):
    """Eight ranks, a trace, a hang with the names of those that wait: each program of the page, as a reader runs it."""
    assert len(PROGRAMS) == 4 and len(COPIED) == 10
    for program, says in PROGRAMS:
        name = "hangs.py" if "hangs" in program else "program.py"
        (alone.folder / name).write_text(program)
        done = alone(name)
        said = done.stderr.partition("HangError: ")[2] if name == "hangs.py" else done.stdout
        assert timeless(said.strip()) == timeless(says.strip()), done
        assert done.returncode == (name == "hangs.py")
    assert "2 ranks, gloo, examined in" in alone("-m", "lib.doctor", "--ranks", "2").stdout
