"""Puts each mistake of tests/mutants.txt into a copy of the library, and runs the test that must fail on it.

    python tools/mutants.py                 # what `make mutants` runs: all of them
    python tools/mutants.py warmup padding  # these

A mutant is killed if pytest ends with a failed test; an error of import kills nothing, and neither does a test that has
no verdict after `LIMIT_S`. Before, all these tests must pass in the copy as it is.
"""

from __future__ import annotations

import compileall
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import NamedTuple

import pytest

from course.release import LIBRARY

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "mutants.txt"
COPIED = (*LIBRARY, "benchmarks", "tests", "tools")
LIMIT_S = float(os.environ.get("LIMIT_S", 60))  # more on a machine that is busy
HEAD = re.compile(r"(\S+) in (lib/\S+\.py): (.+)")


class Mutant(NamedTuple):
    """A mistake: `old`, which is once in `file`, becomes `new`; `test` must fail on it."""

    name: str
    file: str
    wrong: str
    old: str
    new: str
    test: str


def table() -> list[Mutant]:
    """All mutants, in the order of the file."""
    found = []
    for paragraph in TABLE.read_text(encoding="utf-8").strip().split("\n\n")[1:]:  # the first is about the file
        head, edit, test = map(str.strip, paragraph.splitlines())
        old, new = edit.split(" => ")
        found.append(Mutant(*HEAD.fullmatch(head).groups(), old, new, test))
    return found


def faults(mutants: list[Mutant]) -> Iterator[str]:
    """What the table has wrong, without running a test."""
    for one in mutants:
        if (times := (ROOT / one.file).read_text(encoding="utf-8").count(one.old)) != 1:
            yield f"{one.name}: {one.old!r} is {times} times in {one.file}"
        file, _, function = one.test.partition("::")
        path, name = ROOT / file, function.partition("[")[0]
        if not path.exists() or f"\ndef {name}(" not in path.read_text(encoding="utf-8"):
            yield f"{one.name}: there is no {one.test}"


def copied(folder: Path) -> None:
    """Copy what the tests need, compiled so that a source of the same size and second is not taken for the old one."""
    for name in (*COPIED, "pyproject.toml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    compileall.compile_dir(folder / "lib", quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)


def tested(folder: Path, *tests: str, limit_s: float | None = None, quiet: bool = False) -> int | None:
    """The exit code of pytest on the copy, None if the limit passed."""
    out = subprocess.DEVNULL if quiet else None
    command, variables = [sys.executable, "-m", "pytest", "-qx", *tests], os.environ | {"PYTHONPATH": str(folder)}
    try:
        done = subprocess.run(command, cwd=folder, env=variables, stdout=out, stderr=out, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None
    return done.returncode


def outcome(folder: Path, one: Mutant) -> str:
    """`killed in N s`, or that it survives."""
    path, began_s = folder / one.file, time.monotonic()
    right = path.read_text(encoding="utf-8")
    path.write_text(right.replace(one.old, one.new), encoding="utf-8")
    code = tested(folder, one.test, limit_s=LIMIT_S, quiet=True)
    path.write_text(right, encoding="utf-8")
    if code == pytest.ExitCode.TESTS_FAILED:
        return f"killed in {time.monotonic() - began_s:.0f} s"
    ends = f"has no verdict after {LIMIT_S:g} s" if code is None else f"ends with code {code}"
    return f"SURVIVES: {one.wrong}: {one.test} {ends}"


def main(names: list[str]) -> int:
    every = table()
    mutants = [one for one in every if not names or one.name in names]
    unknown = [f"no mutant is called {name}" for name in names if name not in {one.name for one in every}]
    if problems := [*faults(mutants), *unknown]:
        print(*problems, sep="\n", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        copied(folder)
        if tested(folder, *dict.fromkeys(one.test for one in mutants)):
            print("these tests must pass before a mutant is tried", file=sys.stderr)
            return 1
        survive = 0
        for one in mutants:
            said = outcome(folder, one)
            survive += not said.startswith("killed")
            print(f"{one.name}: {said}", flush=True)
    print(f"{len(mutants) - survive} of {len(mutants)} mutants are killed")
    return bool(survive)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
