"""What happens inside one rank that `lib.launch.run` started.

The server of `launch` has imported this file, and torch with it, before it forks a rank: that is why a rank is there in
hundredths of a second. The rank meets the others through a private file, opens its row in the call table, runs the
function, leaves its result in the run's folder, and stays until every rank is done, since a peer may still read from it.
"""

from __future__ import annotations

import datetime
import faulthandler
import inspect
import io
import linecache
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import cloudpickle
import torch
import torch._dynamo  # noqa: F401  # an optimizer's first step imports it, 1.5 s that the server spends once for all
import torch.distributed as dist

from lib import comm, trace, watch
from lib.mesh import Group

in_rank = False  # whether this process is a rank

_PEER_GONE = re.compile(r"Connection (closed|reset) by peer|Connection refused|Broken pipe|Socket closed|Read error")


@dataclass
class Job:
    """All that a rank needs to know, pickled once for all ranks by `cloudpickle`."""

    fn: Callable
    args: tuple
    trace: bool
    cells: dict[str, str] = field(default_factory=dict)  # file of a notebook cell -> its name
    sources: dict[str, str] = field(default_factory=dict)  # ... -> its text, for tracebacks


@dataclass
class Outcome:
    """How a rank ended: `kind` is `ok`, `error`, `peer gone` or `mismatch`."""

    kind: str
    text: str = ""
    error: str = ""


def main(rank: int, world_size: int, folder: str, loopback: str, conn) -> None:
    """The whole life of a rank."""
    global in_rank
    in_rank = True
    _leave_the_terminal(folder, rank)
    table = comm.table = watch.CallTable(os.path.join(folder, "table"), world_size, rank)
    threading.Thread(target=_obey, args=(conn,), daemon=True).start()
    try:
        outcome = _work(rank, world_size, folder, loopback, table)
    except BaseException as error:
        outcome = _explain(error)
    table.state(watch.FINISHED if outcome.kind == "ok" else watch.FAILED)
    sys.stdout.flush()
    sys.stderr.flush()
    conn.send(outcome)
    if outcome.kind != "ok":
        os._exit(1)  # at once: the peers that wait for this rank must notice
    threading.Event().wait()  # until _obey is told to leave


def _work(rank: int, world_size: int, folder: str, loopback: str, table: watch.CallTable) -> Outcome:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = loopback
    with open(os.path.join(folder, "path"), "rb") as file:
        sys.path[:], cwd = pickle.load(file)
    os.chdir(cwd)
    with open(os.path.join(folder, "job"), "rb") as file:
        job: Job = cloudpickle.load(file)
    watch.cells.update(job.cells)
    for name, text in job.sources.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(os.path.join(folder, "store"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(days=1),  # hangs are diagnosed by launch, long before gloo would give up
    )
    _watch_torch_distributed(table)
    world = Group("world", tuple(range(world_size)), rank)
    table.state(watch.RUNNING)
    start_s = time.perf_counter()
    with trace.record(rank) if job.trace else nullcontext() as recorded:
        result = job.fn(world, *job.args)
    end_s = time.perf_counter()
    try:
        torch.save(
            (result, recorded, start_s, end_s), os.path.join(folder, f"result{rank}"), pickle_module=cloudpickle
        )
    except Exception as error:
        text = f"returned {_kind(result)}, which cannot be sent to the process that called run: {error}"
        return Outcome("error", text, type(error).__name__)
    return Outcome("ok")


def _kind(result: object) -> str:
    name = type(result).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _leave_the_terminal(folder: str, rank: int) -> None:
    """Own process group, no Ctrl-C (the parent gets it and ends us); C++ chatter to one file, prints to another."""
    if hasattr(os, "setsid"):
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "fork"):  # locks made in a rank (tqdm has one) then have no name that would outlive it
        multiprocessing.set_start_method("fork", force=True)
    noise = os.open(os.path.join(folder, f"noise{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(noise, 1)
    os.dup2(noise, 2)
    os.close(noise)
    faulthandler.enable(open(2, "w", closefd=False))
    out = open(os.path.join(folder, f"out{rank}"), "wb", buffering=0)
    sys.stdout = sys.stderr = io.TextIOWrapper(out, "utf-8", "backslashreplace", line_buffering=True)


def _obey(conn) -> None:
    """The parent's orders: leave, or say where you are. When the parent is gone, leave."""
    while True:
        try:
            order = conn.recv()
        except (EOFError, OSError):
            os._exit(1)
        if order == "leave":
            os._exit(0)
        frame = sys._current_frames().get(threading.main_thread().ident)
        conn.send("".join(_tidy(traceback.format_stack(frame))))


def _explain(error: BaseException) -> Outcome:
    if isinstance(error, watch.MismatchError):
        return Outcome("mismatch", str(error))
    if isinstance(error, SystemExit):
        return Outcome("error", f"called sys.exit({'' if error.code is None else repr(error.code)})", "SystemExit")
    gone = isinstance(error, RuntimeError) and _PEER_GONE.search(str(error))
    text = "".join(_tidy(traceback.format_exception(error)))
    return Outcome("peer gone" if gone else "error", text, type(error).__name__)


def _tidy(lines: list[str]) -> list[str]:
    """A traceback without this file's own frames, with the names that a reader knows for the files."""
    mine = f'File "{__file__}"'
    threads = f'File "{threading.__file__}"'

    def rename(match: re.Match) -> str:
        return watch.short(match[1]) if match[1] in watch.cells else f'File "{watch.short(match[1])}"'

    return [re.sub(r'File "([^"]+)"', rename, x) for x in lines if mine not in x and threads not in x]


# ---- learners call torch.distributed themselves ---------------------------------------------------------------------

_SYMMETRIC = {  # function -> argument whose shape and dtype all ranks share
    "all_reduce": "tensor",
    "broadcast": "tensor",
    "reduce": "tensor",
    "gather": "tensor",
    "scatter": "tensor",
    "all_gather": "tensor",
    "all_gather_into_tensor": "input_tensor",
    "all_gather_single": "input",
    "reduce_scatter": "output",
    "reduce_scatter_tensor": "output",
    "reduce_scatter_single": "output",
    "all_to_all_single": None,
    "all_to_all": None,
    "barrier": None,
}
_pending: dict[int, Callable] = {}  # id of a Work -> its waiting context


def _watch_torch_distributed(table: watch.CallTable) -> None:
    """Put watched versions of its functions into `torch.distributed`: same behaviour, seen in the call table."""
    for name in (*_SYMMETRIC, "send", "recv", "isend", "irecv"):
        original = getattr(dist, name, None)
        if original is not None:
            watched = _watched(table, name, original)
            for module in (dist, dist.distributed_c10d):
                setattr(module, name, watched)
    original_wait = dist.Work.wait

    def wait(work: dist.Work, *args, **kwargs):
        with _pending.pop(id(work), nullcontext)():
            return original_wait(work, *args, **kwargs)

    dist.Work.wait = wait


def _watched(table: watch.CallTable, name: str, original: Callable) -> Callable:
    signature = inspect.signature(original)

    def call(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        group = given.get("group") or dist.group.WORLD
        ranks = tuple(dist.get_process_group_ranks(group))
        line = watch.where(2)
        if name in _SYMMETRIC:
            x = given.get(_SYMMETRIC[name])
            what = " ".join([name, *([comm._spec(x)] if isinstance(x, torch.Tensor) else [])])
            if "op" in given:
                what += f" {str(given['op']).rsplit('.')[-1].lower()}"
            number, channel, peers = table.call(f"{ranks}", ranks, what, line), f"{ranks}", ranks
        else:
            sends = name in ("send", "isend")
            peer = given.get("dst" if sends else "src")
            inside = given.get("group_dst" if sends else "group_src")
            peer = ranks[inside] if peer is None and inside is not None else peer
            if peer is None:  # from anybody: no order to compare
                return original(*args, **kwargs)
            me, spec = dist.get_rank(), comm._spec(given["tensor"])
            src, dst = (me, peer) if sends else (peer, me)
            channel, peers = f"{src}>{dst}", (peer,)
            number = table.call(channel, (src, dst), f"message {spec}", line)
            what = f"{'send to' if sends else 'recv from'} {peer}, {spec}"

        def waiting():
            return table.waiting(what, line, peers, channel, number)

        with waiting():
            work = original(*args, **kwargs)
        if isinstance(work, dist.Work):
            _pending[id(work)] = waiting
        return work

    return call
