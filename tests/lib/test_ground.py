"""The ground, on which ranks start, talk and are watched, stands alone: no model, no page, nothing else of `lib`."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "book" / "ranks.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", PAGE, re.DOTALL)
COPIED = [path for line in re.findall(r"^cp -r (.*) mine/lib/$", PAGE, re.MULTILINE) for path in shlex.split(line)]
RENAME = re.search(r"^perl .*$", PAGE, re.MULTILINE)[0]


def program(word, file):
    """The program of the page with this word in it, and what the page says of it, where it has the name of a file."""
    ((text, says),) = [(text, says) for text, says in PROGRAMS if word in text]
    return file, text, says


@pytest.fixture
def alone(tmp_path):
    """Runs Python in a folder with what the page says to copy."""
    (tmp_path / "lib").mkdir()
    for path in COPIED:
        source = ROOT / path
        copy = shutil.copytree if source.is_dir() else shutil.copy2
        copy(source, tmp_path / "lib" / source.name)

    def python(*args, said="", **variables):
        variables = os.environ | {"PYTHONPATH": str(tmp_path)} | variables
        pipes = {"capture_output": True, "text": True, "timeout": 120, "input": said}
        return subprocess.run([sys.executable, *args], cwd=tmp_path, env=variables, **pipes)

    python.folder = tmp_path
    return python


def timeless(text):
    return re.sub(r"\b\d+\.\d s\b", "0.0 s", text)


def test_the_page_has_these_programs():
    assert len(PROGRAMS) == 9 and len(COPIED) == 10


RUN_AS_THEY_ARE = {
    "mesh.group": "program.py",
    "def hangs": "hangs.py",
    "def numbered": "program.py",
    "def connects": "program.py",
    "DistributedDataParallel": "ddp.py",
    "settings=": "program.py",
    "stands_on_lib": "program.py",
}


@pytest.mark.parametrize("word", RUN_AS_THEY_ARE)
def test_the_ground_stands_alone(word, alone):
    """Eight ranks, a trace, a hang with the names of those that wait: each program of the page, as a reader runs it."""
    file, text, says = program(word, RUN_AS_THEY_ARE[word])
    (alone.folder / file).write_text(text)
    done = alone(file)
    fails = re.search(r"^lib\.runtime\.\w+\.\w+: ", done.stderr, re.MULTILINE)
    said = done.stderr[fails.end() :] if fails else done.stdout
    shown, dots, _ = timeless(says.strip()).partition("\n...")
    assert timeless(said.strip())[: len(shown) if dots else None] == shown, done
    assert done.returncode == (file in ("hangs.py", "ddp.py"))


def test_the_doctor_stands_alone(alone):
    assert "2 ranks, gloo, examined in" in alone("-m", "lib.doctor", "--ranks", "2").stdout


def test_a_function_stops_in_a_debugger_where_it_is_the_only_rank(alone):
    _, text, _ = program("def mean", "")
    (alone.folder / "program.py").write_text(text)
    done = alone("program.py", said="p total.tolist()\nc\n")
    assert done.returncode == 0 and "(Pdb) [1.0, 1.0]\n" in done.stdout, done


def test_one_rank_of_several_stops_in_a_debugger(alone):
    """Each in a terminal of its own, with the variables that the page shows."""
    _, text, _ = program("timeout_s=3600", "")
    (alone.folder / "stops.py").write_text(text)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    told = os.environ | {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    told |= {"PYTHONPATH": str(alone.folder)}
    command, pipe = [sys.executable, "stops.py"], subprocess.PIPE
    ranks = [
        subprocess.Popen(command, cwd=alone.folder, env=told | {"RANK": r, "LOCAL_RANK": r}, stdin=pipe, stdout=pipe)
        for r in "01"
    ]
    assert b"(Pdb) 1\n" in ranks[1].communicate(b"p world.rank\nc\n", timeout=120)[0]
    assert ranks[0].communicate(timeout=120)[0] == b""
    assert [rank.returncode for rank in ranks] == [0, 0]


def test_a_copy_works_beside_a_lib_of_ones_own(alone):
    """Under its own name, at the top or inside a package; by its old name Python finds the other one."""
    names = {"parallel": "parallel", "mine.parallel": "mine/parallel"}
    for name, place in names.items():
        shutil.copytree(alone.folder / "lib", alone.folder / place)
        command = RENAME.replace("mine/parallel", place).replace("$1 parallel", f"$1 {name}")
        subprocess.run(command, shell=True, cwd=alone.folder, check=True)
    shutil.rmtree(alone.folder / "lib")
    (alone.folder / "lib").mkdir()
    (alone.folder / "lib" / "__init__.py").write_text("")
    _, text, says = program("def numbered", "")
    for name in names:
        (alone.folder / "program.py").write_text(text.replace("from lib.", f"from {name}."))
        done = alone("program.py")
        assert done.stdout == says, done
    # An editable install finds its `lib.launch` in any `lib`; a wheel and a folder do not.
    installed = "import sys\nsys.meta_path[:] = [one for one in sys.meta_path if 'editable' not in one.__module__]\n"
    (alone.folder / "program.py").write_text(installed + text)
    assert "No module named 'lib.launch'" in alone("program.py").stderr
