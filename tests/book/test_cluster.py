"""The file for Slurm is linted and runs, with stand-ins for Slurm; the pages of chapter 16 say what is in the files."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SBATCH = ROOT / "book" / "cluster" / "train.sbatch"
CHAPTER, DEEPER = (ROOT / "chapters" / name for name in ("16_on_a_cluster.md", "16b_cluster_deeper.md"))
BIN = Path(sys.executable).parent
SMALL = "--dp 2 --context 16 --d-model 24 --num-layers 1 --num-heads 2 --global-batch 4 --validate-every 0"

# What the file asks of Slurm, on this machine: the names of the nodes, so many that a reader of the first may be gone
# before the last; and a command on each node. Each is noted, and DOCTOR is the module that stands in for the doctor.
STAND_INS = {
    "scontrol": "echo localhost; seq 100000",
    "srun": 'echo "$@" >> "$NOTES"; while [[ $1 == --* ]]; do shift; done; "${@/#lib.doctor/$DOCTOR}"',
}


def sbatch(folder, arguments, doctor="timeit"):
    """The job, as Slurm would run it on one node with two GPUs; and the commands that it gave to `srun`."""
    for name, line in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    (folder / "train.sbatch").write_text(SBATCH.read_text().replace("29500", str(port)))
    notes = folder / "notes"
    notes.unlink(missing_ok=True)
    env = os.environ | {"PATH": f"{folder}:{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "NOTES": str(notes)}
    env |= {"DOCTOR": doctor, "GPUS": "2", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env |= {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7"}
    command = ["bash", "train.sbatch", *arguments.split()]
    job = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return job, notes.read_text().splitlines()


def test_the_file_is_linted():
    lint = subprocess.run([BIN / "shellcheck", SBATCH], capture_output=True, text=True)
    assert lint.returncode == 0, lint.stdout


def test_the_block_of_the_chapter_is_a_part_of_the_file():
    (block,) = (text for text in re.findall(r"```bash\n(.*?)```", CHAPTER.read_text(), re.DOTALL) if "srun" in text)
    lines = [line for line in SBATCH.read_text().splitlines() if line and not line.startswith("export")]
    assert "\n".join(line for line in block.splitlines() if line) in "\n".join(lines)


@pytest.mark.thorough("four torchruns of two processes")
@pytest.mark.slow("four torchruns of two processes")
def test_a_job_trains_and_continues_when_it_is_started_again(tmp_path):
    job, commands = sbatch(tmp_path, f"{SMALL} --steps 2")
    assert job.returncode == 0 and "step 0/2" in job.stdout and "step 2/2" in job.stdout, job.stdout
    assert [re.search(r"-m (\S+)", command)[1] for command in commands] == ["lib.doctor", "lib.train"]
    assert all("--nnodes 1 --nproc-per-node 2" in c and "--rdzv-endpoint localhost:" in c for c in commands)
    again, _ = sbatch(tmp_path, f"{SMALL} --steps 3")
    assert again.returncode == 0 and "step 2/3" in again.stdout and "step 3/3" in again.stdout, again.stdout
    assert "step 0/3" not in again.stdout, again.stdout
    assert (tmp_path / "runs" / "step-00000003").is_dir()


def test_what_the_doctor_finds_ends_the_job(tmp_path):
    job, commands = sbatch(tmp_path, SMALL, doctor="no_such_module")
    assert job.returncode != 0 and len(commands) == 1


def test_files_of_pytorch_on_the_map_exist():
    rows = [line for line in DEEPER.read_text().splitlines() if line.startswith("- [") and "../lib/" in line]
    named = [path for row in rows for path in re.findall(r"`(torch/\S+\.py)`", row)]
    assert len(rows) > 10 and len(named) > 10
    missing = [path for path in named if not (Path(torch.__file__).parents[1] / path).is_file()]
    assert not missing
