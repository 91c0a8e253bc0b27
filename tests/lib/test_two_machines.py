"""The README's line for several machines, as it stands there, with two agents on this one (about 15 s)."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lib.train import main
from tests.lib.two_hosts import cannot

README = Path(__file__).resolve().parents[2] / "README.md"
FLAGS = "--context 16 --d-model 24 --num-layers 1 --num-heads 2 --global-batch 4 --steps 2 --dtype float64"


def line_of_the_readme() -> str:
    text = README.read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = re.findall(r"^\.venv/bin/torchrun (.*--nnodes 2 .*)$", text, re.MULTILINE)
    return line


@pytest.mark.skipif(not cannot(), reason="test_two_hosts.py runs it, on two hosts")
@pytest.mark.slow("two torchruns, whose four processes import torch on two cores")
@pytest.mark.thorough("two torchruns")
def test_the_line_for_two_machines(tmp_path):
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    line = line_of_the_readme()
    for there, here in (
        ("node0:29500", f"localhost:{port}"),
        ("--nproc-per-node 8", "--nproc-per-node 1"),
        (" 16", " 2"),
    ):
        assert line.count(there) == 1
        line = line.replace(there, here)
    command = [sys.executable, "-m", "torch.distributed.run", *line.split(), *FLAGS.split()]
    report, serial = tmp_path / "two.json", tmp_path / "one.json"
    agents = [
        subprocess.Popen(
            [*command, "--report", str(report)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for _ in range(2)
    ]
    try:
        said = [agent.communicate(timeout=90)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()  # it ends its ranks
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(said)
    assert sum(text.count("validation:") for text in said) == 1, "one rank in all reports"
    main([*FLAGS.split(), "--report", str(serial)])
    ranks = json.loads(report.read_text(encoding="utf-8"))["ranks"]
    (alone,) = json.loads(serial.read_text(encoding="utf-8"))["ranks"]
    assert [rank["losses"] for rank in ranks] == [pytest.approx(alone["losses"], rel=1e-12)] * 2
    assert "reduce_scatter dp" in ranks[0]["traffic"]
