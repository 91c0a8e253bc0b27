"""Start ranks: `run(fn, 4)` calls `fn` in four processes that can communicate, and returns their results.

The problem: a new process needs seconds to import torch; eight of them on two cores need half a minute, for each
notebook cell. If one of them dies or waits forever, the cell also hangs.
The idea: one server process imports torch once, and forks a rank in a hundredth of a second. This process watches: it
collects results and output, names the rank that failed, and ends a run in which nothing moves with a table of the ranks
that wait. No process and no file is left in any case. `init()` is the start of the same code under `torchrun`, on many
machines (`lib.torchrun`).

This is the door for whoever has no GPT: `launch`, `comm`, `mesh`, `trace`, `kineto`, `runtime/`, `torchrun/`, `doctor/`
and `cost/` work without the rest of the library (the page *Ranks without the book*; `tests/lib/test_ground.py`).
"""

from __future__ import annotations

import linecache
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lib.runtime import call_table, headroom, own_rank, places
from lib.runtime.call_table import MismatchError  # noqa: F401 a caller finds the errors of `run` here
from lib.runtime.errors import RankError, RunError, RunTimeout  # noqa: F401
from lib.runtime.hang import HangError  # noqa: F401
from lib.runtime.headroom import RUN, Folder
from lib.runtime.ranks import Ranks
from lib.runtime.server import server, start_server
from lib.torchrun.start import close, init  # noqa: F401
from lib.trace import Trace

if TYPE_CHECKING:
    import torch


MAX_RANKS = 64
LEAST_DISK_BYTES = headroom.MB  # for a run, and for each of its ranks: with less, the disk counts as full


class Run(list):
    """The results of the ranks, in rank order.

    Attributes:
        trace: all ranks' communication and spans (`lib.trace.Trace`), or None without `trace=True`.
        wall_s: seconds from the call of `run` to its return.
    """

    trace: Trace | None = None
    wall_s: float = 0.0


def run(fn: Callable, world_size: int, *args: Any, timeout_s: float = 60, trace: bool = False) -> Run:
    """Call `fn(world, *args)` on every rank, each in a separate process.

    `fn` may be defined in a notebook cell. Output of the ranks appears in rank order, the output of rank 0 immediately;
    of a rank that prints more than 20 kB, the first 8 kB and the last 6 kB. Output of programs that they start does not
    appear: capture it (`subprocess.run(..., capture_output=True)`) and print it.

    RANK, LOCAL_RANK and WORLD_SIZE are set, as under torchrun. `init_process_group` and `breakpoint` are refused: the
    ranks are connected already, and have no terminal. Calls of `torch.distributed` are watched and traced, but not the
    messages of its C++ code, such as those of DistributedDataParallel: if they hang, only `timeout_s` ends the run.

    Args:
        fn: function of a `Group` (all ranks) and `args`.
        world_size: number of ranks, 1 to 64.
        args: the same for each rank; tensors arrive as copies, and tensors that share memory here also share it there.
        timeout_s: seconds that `fn` may take; the start of the ranks does not count.
        trace: whether to collect all communication that is watched in `Run.trace`.

    Raises:
        ValueError, TypeError: an invalid world size, or an argument that cannot be sent to a process.
        RankError: a rank failed; the message holds its traceback.
        HangError: ranks wait forever; the message lists each rank and the call it waits in. While a rank has a thread
            of yours that does not wait, it might still send: then only `timeout_s` ends the run.
        MismatchError: ranks made different calls where they must make the same call.
        RunTimeout: `fn` took longer than `timeout_s`. If nothing moves by then, a hang is awaited for 2 s more.
        RunError: memory or disk is too small; or a file of `lib` was edited and is not valid Python.

    Example:
        import torch

        from lib import comm
        from lib.launch import run

        def sum_of_ranks(world):
            return comm.all_reduce(torch.tensor(world.rank), world).item()

        assert run(sum_of_ranks, 2) == [1, 1]
    """
    __tracebackhide__ = True  # pytest shows the line that called `run`, and none of this library
    _check(fn, world_size, timeout_s)
    began_s = time.perf_counter()
    place, needs_bytes = tempfile.gettempdir(), (1 + world_size) * LEAST_DISK_BYTES
    if headroom.free_disk_bytes(place) < needs_bytes:
        needs = f"a run of {world_size} ranks needs {headroom.size_text(needs_bytes)}"
        raise RunError(headroom.full_disk(place, needs))
    # The server first: if torch is not imported here yet, both imports run at the same time.
    with Folder(RUN) as folder, server() as forks:
        table = _write_job(folder, fn, args, trace, world_size)
        ranks = Ranks(world_size, folder, table)
        try:
            ranks.start(forks)
            ranks.join(timeout_s)
            result = _collect(folder, world_size)
        finally:
            ranks.end()
            table.close()
    result.wall_s = time.perf_counter() - began_s
    return result


def device() -> torch.device:
    """Where this rank's tensors belong: its CUDA device under NCCL, else the CPU."""
    import torch
    import torch.distributed as dist

    nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def done_s() -> float:
    """`time.perf_counter()` when this rank's GPU has done all the work that it was given; without a GPU, now."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _check(fn: Callable, world_size: int, timeout_s: float) -> None:
    __tracebackhide__ = True
    if own_rank.is_here:
        raise RuntimeError("run() was called inside a rank; call it from the notebook or script itself")
    if not callable(fn):
        raise TypeError(f"run needs a function as its first argument, but got {fn!r}: run(fn, world_size, ...)")
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise TypeError(f"world_size={world_size!r} must be a whole number of ranks")
    if not 1 <= world_size <= MAX_RANKS:
        raise ValueError(
            f"world_size={world_size} must be between 1 and {MAX_RANKS}: each rank is a process on this machine; "
            "for more, start the same code with torchrun on several machines"
        )
    if not isinstance(timeout_s, (int, float)):
        raise TypeError(f"timeout_s={timeout_s!r} must be a number of seconds")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s={timeout_s!r} must be above 0 seconds")


def _write_job(folder: str, fn: Callable, args: tuple, trace: bool, world_size: int) -> call_table.CallTable:
    """Write the input of the ranks as files; return the call table that they share."""
    __tracebackhide__ = True
    from lib.runtime.pickled import Pickled
    from lib.runtime.worker import Job

    cells, sources = _notebook_cells()
    try:
        job = Pickled(Job(fn, args, trace, cells, sources))
    except Exception as error:
        name = getattr(fn, "__name__", fn)
        raise TypeError(f"{name} or its arguments cannot be sent to another process: {error}") from None
    try:
        job.write(os.path.join(folder, "job"))
        return call_table.CallTable(os.path.join(folder, "table"), world_size)
    except OSError as error:
        place = tempfile.gettempdir()
        if not headroom.is_full(error, place):
            raise
        needs = f"the function and its arguments take {headroom.size_text(job.size_bytes)}"
        raise RunError(headroom.full_disk(place, needs)) from None


def _notebook_cells() -> tuple[dict[str, str], dict[str, str]]:
    """Name and text of each notebook cell that was run, by its file name in Python."""
    ipython = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if ipython is None:
        return {}, {}
    counts = getattr(ipython.compile, "_filename_map", {})
    names = [name for name in linecache.cache if name in counts or "ipykernel_" in name]
    cells = {name: f"Cell In[{counts[name]}]" if name in counts else "Cell" for name in names}
    places.cells.update(cells)
    return cells, {name: "".join(linecache.getlines(name)) for name in names}


def _collect(folder: str, world_size: int) -> Run:
    __tracebackhide__ = True
    from lib.runtime import pickled

    paths = [os.path.join(folder, f"result{rank}") for rank in range(world_size)]
    size_bytes, memory = sum(map(os.path.getsize, paths)), headroom.system_memory()
    if memory and size_bytes > memory.free_bytes - memory.floor_bytes():
        raise RunError(
            f"the ranks returned {headroom.size_text(size_bytes)} in all, too much for this process: {memory}. Return "
            "less: a shard or a sum, or let each rank save its result to a file"
        )
    results, problem = [], ""
    for rank, path in enumerate(paths):
        try:
            results.append(pickled.read(path, {}))
        except Exception as error:
            problem = f"rank {rank} of {world_size} returned a value that cannot be read here: {error}"
        if problem:  # outside the except: one error, not two
            raise RankError(problem, rank)
    values, traces, starts_s = zip(*results, strict=True)
    out = Run(values)
    if traces[0] is not None:
        out.trace = Trace.merge(traces, start_s=min(starts_s))
    return out


if "ipykernel" in sys.modules and multiprocessing.parent_process() is None:
    start_server()  # it takes four seconds, while the notebook imports torch itself
