"""The program of one rank that `lib.launch.run` started.

The server imports this file, and torch with it, before it forks a rank. The rank meets the others through a private
file, opens its row in the call table, runs the function, and writes its result to the folder of the run. It stays until
every rank is done, because a peer may still read from it.
"""

import datetime
import faulthandler
import io
import linecache
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field

import numpy
import torch
import torch.distributed as dist

from lib import trace
from lib.runtime import (
    asserts,
    calls,
    hang,
    headroom,
    output,
    own_rank,
    places,
    record_torch_calls,
    refused_calls,
    threads,
)
from lib.runtime.call_table import CallTable, MismatchError
from lib.runtime.errors import RankError
from lib.runtime.group import Group
from lib.runtime.pickled import Pickled, read

MOST_SAID = 20_000  # letters of a traceback

# A function under torch.autograd.function.once_differentiable is pickled with the globals of torch's wrapper. That
# module cannot be imported; in `sys.modules` a rank finds it by name.
sys.modules.setdefault("torch._C._functions", torch._C._functions)

_MINE_FILES = (__file__, output.__file__, record_torch_calls.__file__, refused_calls.__file__)
_MINE = tuple(f'File "{file}"' for file in _MINE_FILES)
_PEER_GONE = re.compile(r"Connection (closed|reset) by peer|Connection refused|Broken pipe|Socket closed|Read error")


@dataclass
class Job:
    """Everything a rank needs, packed once for all ranks."""

    fn: Callable
    args: tuple
    trace: bool
    cells: dict[str, str]  # file of a notebook cell -> its name
    sources: dict[str, str]  # file of a notebook cell -> its text, for tracebacks
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)


def rank_main(rank: int, world_size: int, folder: str, place: tuple, conn, questions) -> None:
    """Run one rank from start to end; `place` is the caller's `sys.path`, arguments, working folder, environment, and
    modules of tests.
    """
    own_rank.is_here = True
    _leave_the_terminal(folder, rank)
    table = calls.table = CallTable(os.path.join(folder, "table"), world_size, rank)
    threading.Thread(target=_obey, args=(questions, folder), daemon=True).start()
    kind, failed = "ok", None
    try:
        _work(rank, world_size, folder, place, table)
    except BaseException as error:
        kind, failed = _explain(error, rank, world_size, os.path.dirname(folder))
    table.state(hang.FINISHED if kind == "ok" else hang.FAILED)
    with suppress(Exception):  # a full disk, or a closed stdout: the outcome matters more
        sys.stdout.flush()
        sys.stderr.flush()
    conn.send((kind, failed))
    if failed:
        os._exit(1)  # immediately: the peers that wait for this rank must notice
    threading.Event().wait()  # until the parent ends this process


def _work(rank: int, world_size: int, folder: str, place: tuple, table: CallTable) -> None:
    torch.set_num_threads(1)
    sys.path[:], sys.argv, cwd, environment, tests = place
    asserts.import_with_values(tests)
    os.chdir(cwd or ".")
    os.environ.clear()
    os.environ.update(own_rank.told_to_rank(environment, rank, world_size))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    store, limit = dist.FileStore(os.path.join(folder, "store"), world_size), datetime.timedelta(days=1)
    # The process that called `run` reports a hang long before gloo would.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    numpy.random.seed()  # or all forks would draw the same numbers as the server
    refused_calls.refuse_in_ranks()
    record_torch_calls.watch_calls()  # before the job is read, which may refer to such functions by name
    # torch.compile looks there for what a function uses
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    job: Job = read(os.path.join(folder, "job"), vars(main))
    torch.set_default_dtype(job.default_dtype)
    places.cells.update(job.cells)
    for name, text in job.sources.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    world = Group("world", tuple(range(world_size)), rank)
    table.state(hang.RUNNING)
    me, start_s = os.getpid(), time.perf_counter()
    with trace.record(rank) if job.trace else nullcontext() as recorded:
        try:
            result = job.fn(world, *job.args)
        finally:
            if os.getpid() != me:
                _end_of_a_copy(sys.exc_info()[1])
    path, name = os.path.join(folder, f"result{rank}"), type(result).__name__
    what = f"rank {rank} of {world_size} returned {'an' if name[0] in 'aeiou' else 'a'} {name} that cannot be sent"
    try:
        packed = Pickled((result, recorded, start_s))
    except Exception as error:
        raise RankError(f"{what} to the process that called run: {error}", rank, type(error).__name__) from None
    try:
        packed.write(path)
    except OSError as error:
        if not headroom.is_full(error, folder):
            raise
        with suppress(OSError):
            os.remove(path)
        needs = f"the result takes {headroom.size_text(packed.size_bytes)}"
        full = headroom.full_disk(os.path.dirname(folder), needs)
        raise RankError(f"{what}: {full}", rank, "OSError") from None


def _end_of_a_copy(error: BaseException | None) -> None:
    """End a process that the function forked and that returned from it: it has no part in the run."""
    code = error.code if isinstance(error, SystemExit) else error and 1
    if error and not isinstance(error, SystemExit):
        traceback.print_exception(error)
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _leave_the_terminal(folder: str, rank: int) -> None:
    """Start a process group, ignore Ctrl-C (the parent handles it), and send C++ output and prints to two files."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, the system ends a rank, not the notebook
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    multiprocessing.set_start_method("fork", force=True)  # so a rank's locks have no name that would outlive it
    multiprocessing.current_process().daemon = False  # or a DataLoader could not start workers
    with open(os.path.join(folder, f"noise{rank}"), "ab", buffering=0) as noise:
        os.dup2(noise.fileno(), 1)
        os.dup2(noise.fileno(), 2)
    faulthandler.enable(open(2, "w", closefd=False), all_threads=False)
    out = output.Writer(os.path.join(folder, f"out{rank}"), rank)
    sys.stdout = sys.stderr = io.TextIOWrapper(out, "utf-8", "backslashreplace", line_buffering=True)


def _obey(questions, folder: str) -> None:
    """Answer the parent's question where this rank is. When the parent has ended, remove the folder and exit."""
    while True:
        try:
            questions.recv()
        except (EOFError, OSError):
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)
        questions.send(_where())


def _where() -> tuple[str, bool]:
    """The stacks of the reader's threads, main thread first, and whether one may send before it receives."""
    main, names = threading.main_thread().ident, {thread.ident: thread.name for thread in threading.enumerate()}
    parts, may_send = [], False
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        readers = threads.is_readers(frame)
        if ident == main or readers:
            lines = traceback.format_stack(frame)
            start = next((i for i, line in enumerate(lines) if _mine(line)), 0)
            parts += [f"{names.get(ident, 'a thread')}:\n"] * (ident != main) + _tidy(lines[start:])
        may_send |= readers and threads.is_free(frame)
    return "".join(parts), may_send


def _explain(error: BaseException, rank: int, world_size: int, temporary: str) -> tuple[str, Exception]:
    """`error`, or `peer gone`, which is never the cause; and the error that the run raises for it."""
    if isinstance(error, MismatchError):
        return "error", MismatchError(str(error), error.ranks)
    if isinstance(error, RankError):  # of this file
        return "error", error
    name, trace_back = type(error).__name__, "".join(_tidy(traceback.format_exception(error))).rstrip()
    who, did, kind = f"rank {rank} of {world_size}", f"raised {name}", "error"
    if isinstance(error, SystemExit):
        did = f"called sys.exit({'' if error.code is None else repr(error.code)})"
    elif _PEER_GONE.search(trace_back):
        who = f"a rank closed its connections, as destroy_process_group does, while others needed them: {who}"
        kind = "peer gone"
    left, memory = "", headroom.system_memory()  # of what ran out: disk for temporary files, or memory
    if isinstance(error, OSError) and headroom.is_full(error, temporary):
        left = f"\n{headroom.full_disk(temporary, 'a write did not fit')}."
    elif memory and (isinstance(error, MemoryError) or "can't allocate memory" in trace_back):
        left = f"\n{memory}."
    if len(trace_back) > MOST_SAID:  # it may hold a printed tensor
        half = MOST_SAID // 2
        out = f"\n... {len(trace_back) - 2 * half:,} letters left out ...\n"
        trace_back = trace_back[:half] + out + trace_back[-half:]
    trace_back += left
    return kind, RankError(f"{who} {did}" + f"\n\n{trace_back}" * bool(trace_back), rank, name, trace_back)


def _tidy(lines: list[str]) -> list[str]:
    """A traceback without the frames of this file, with file names as the reader knows them."""

    def rename(match: re.Match) -> str:
        return places.short(match[1]) if match[1] in places.cells else f'File "{places.short(match[1])}"'

    return [re.sub(r'File "([^"]+)"', rename, x) for x in lines if not _mine(x)]


def _mine(line: str) -> bool:
    return any(file in line for file in _MINE)
