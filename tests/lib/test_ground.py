"""The ground, on which ranks start, talk and are watched, stands alone: no model, no page, nothing else of `lib`."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
GROUND = "__init__.py launch.py comm.py mesh.py trace.py kineto.py runtime torchrun doctor cost".split()

PROGRAM = """
    import sys
    import torch
    from lib import comm
    from lib.launch import HangError, run
    from lib.mesh import Mesh, MeshShape

    def works(world):
        mesh = Mesh(MeshShape(dp=4, tp=2), world)
        return comm.all_reduce(torch.ones(3), mesh.group("dp")).tolist()

    got = run(works, 8, trace=True)
    assert got == [[4.0] * 3] * 8
    assert got.trace.select(rank=0).traffic() == {("all_reduce", "dp"): (1, 18.0)}

    def hangs(world):
        if world.rank != 1:
            comm.barrier(world)

    try:
        run(hangs, 3)
    except HangError as error:
        print(error)
    others = [name for name in sys.modules if name.split(".")[0] in ("course", "book")]
    assert not others, others
"""


def test_the_ground_stands_alone(tmp_path):
    """Eight ranks, a trace, a hang with the names of those that wait, and the doctor, from a copy of these files."""
    (tmp_path / "lib").mkdir()
    for name in GROUND:
        source = ROOT / "lib" / name
        copy = shutil.copytree if source.is_dir() else shutil.copy2
        copy(source, tmp_path / "lib" / name)
    (tmp_path / "script.py").write_text(textwrap.dedent(PROGRAM))
    variables = os.environ | {"PYTHONPATH": str(tmp_path)}

    def python(*args):
        return subprocess.run(
            [sys.executable, *args], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120
        )

    done = python("script.py")
    assert done.returncode == 0, done.stderr
    assert "ranks 0 and 2 wait; rank 1 has finished" in done.stdout and "in hangs: comm.barrier(world)" in done.stdout
    assert "2 ranks" in python("-m", "lib.doctor", "--ranks", "2").stdout
