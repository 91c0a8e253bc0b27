"""The variables by which torchrun tells a process which rank it is; clusters and containers may set some of them."""

import os

from lib.runtime.server import RunError

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")


class StartError(RunError, ValueError):
    """The variables of torchrun contradict each other or this machine."""


def of_torchrun() -> tuple[int, int]:
    """Number of this rank, and of all ranks; 0 and 0 without torchrun, also for a single rank without an address.

    Raises:
        StartError: a variable is missing or invalid.
    """
    given = _given()
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("SLURM_NTASKS") or "1"
    if "SLURM_PROCID" in os.environ and tasks != "1" and not given.keys() & {"RANK", "WORLD_SIZE"}:
        raise StartError(
            f"srun started {tasks} tasks, and each would train alone: let srun start one torchrun per node (srun "
            "--ntasks-per-node 1 torchrun ...), or unset SLURM_PROCID to train in this process alone"
        )
    alone = given.get("WORLD_SIZE") == "1" and given.get("RANK", "0") == "0"
    if alone and not given.keys() >= {"MASTER_ADDR", "MASTER_PORT"} or not given.keys() & {"RANK", "WORLD_SIZE"}:
        return 0, 0
    rank, size, _ = (_whole(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if "MASTER_ADDR" not in given or rank >= size:
        raise _error(f"RANK={rank} must be below WORLD_SIZE={size}" if rank >= size else "MASTER_ADDR is not set")
    return rank, size


def machines() -> int:
    """How many machines torchrun started ranks on; 1 without torchrun."""
    return int(os.environ.get("GROUP_WORLD_SIZE") or 1)


def speaks(rank: int) -> bool:
    """Whether this rank prints errors that all ranks have: the first on its machine."""
    return (os.environ.get("LOCAL_RANK") or str(rank)) == "0"


def gpu_of_rank(visible: int) -> int:
    """The number of this rank's GPU; a StartError if it is not among the visible ones."""
    local, ranks = _whole("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE") or "too many"
    if local >= visible:
        limit = f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}"
        raise StartError(
            f"LOCAL_RANK={local} has no GPU: {ranks} ranks on this machine, but {visible} visible ({limit}); start "
            f'torchrun with --nproc-per-node {visible}, or use the CPU: init(device="cpu"), or CUDA_VISIBLE_DEVICES=""'
        )
    return local


def _given() -> dict[str, str]:
    return {name: value for name in NAMES if (value := os.environ.get(name, "").strip())}


def _whole(name: str) -> int:
    value = _given().get(name, "")
    if not value.isdecimal():
        raise _error(f"{name}={value!r} is not a whole number" if value else f"{name} is not set")
    return int(value)


def _error(problem: str) -> StartError:
    said = ", ".join(f"{name}={value}" for name, value in _given().items())
    way_out = f"start with torchrun, which sets {', '.join(NAMES)}, or unset them to run without it"
    return StartError(f"{problem} (the environment has {said}); {way_out}")
