"""The processes of one run: started, watched, listened to, and always ended.

The problem: of four ranks one fails, and three report "connection closed by peer"; or none fails, and all wait. What
the reader needs is one sentence about the one cause, a second later, and a machine with nothing left running.

The idea: ranks come from a server that has imported torch already. This side polls: what ranks say, whether they live,
what they print, and how often they have moved (`lib.watch`). A rank that lost a peer is never the cause.
"""

from __future__ import annotations

import codecs
import contextlib
import glob
import itertools
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import types
from multiprocessing import connection, forkserver, resource_tracker
from typing import Any

from lib import watch

STILL_S = 2.0  # all ranks wait and nothing moves for so long: they will wait for ever
SPIN_S = 10.0  # ... for so long, though a processor is busy: a message that large does not fit in memory
GRACE_S = 0.5  # after a failure, how long to listen for the rank that caused it
ALIKE_S = 0.2  # ... and, when that is known, for ranks that fail alike

_HERE = os.path.dirname(os.path.abspath(__file__))
_server_is_of = 0.0  # time of the newest file of lib that the server has read
_one_at_a_time = threading.Lock()  # starting changes what belongs to the whole process: __main__, its environment


class RunError(RuntimeError):
    """A run that could not return."""


class RankError(RunError):
    """A rank raised an exception, left, or was killed.

    Args:
        rank: which one.
        error: name of its exception type, or "" if it died without one.
    """

    def __init__(self, message: str, rank: int, error: str = "") -> None:
        super().__init__(message)
        self.rank, self.error = rank, error


class HangError(RunError):
    """All ranks wait for each other."""


class RunTimeout(RunError, TimeoutError):
    """The ranks still computed when the time was up."""


class Ranks:
    """The processes of one run."""

    def __init__(self, world_size: int, folder: str, table: watch.CallTable) -> None:
        self.folder, self.table, self.size = folder, table, world_size
        self.processes: list[Any] = []
        self.conns: list[connection.Connection] = []
        self.done: set[int] = set()
        self.printed = 0
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.at_line_start = True

    def start(self) -> None:
        from lib import rank as rank_main

        loopback = "lo0" if sys.platform == "darwin" else "lo"
        context = start_server()
        with _one_at_a_time, _uninterrupted(), _without_main():
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                args = (rank, self.size, self.folder, loopback, theirs)
                process = context.Process(target=rank_main.main, args=args, daemon=True)
                self.processes.append(process)
                self.conns.append(ours)
                try:
                    process.start()
                except (EOFError, ConnectionError):
                    raise RunError(
                        "the server that ranks come from could not start; it has printed why, here or in the terminal"
                    ) from None
                theirs.close()

    def join(self, timeout_s: float) -> None:
        """Wait until all are done; raise what went wrong. Whatever happens, show what they printed."""
        try:
            self._join(timeout_s)
        finally:
            others = (self._labelled(rank, self._read(f"out{rank}")) for rank in range(1, self.size))
            self._show(self._rank_0() + "".join(others))  # in one piece: a notebook stores one output

    def _join(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        moves, since, busy_s = None, 0.0, 0.0
        while len(self.done) < self.size:
            ready = self._wait(0.05)
            self._show(self._rank_0())
            for rank in ready:
                self._hear(rank)
            now = time.monotonic()
            if now > deadline:
                raise RunTimeout(self._timeout(timeout_s))
            latest = self.table.moves()
            if latest != moves or not self.table.all_wait():
                moves, since, busy_s = latest, now, self._busy_s()
            elif (still_s := now - since) > STILL_S:
                # A large message under way keeps a processor busy; but gloo may spin on one that nobody will ever take.
                if self._busy_s() - busy_s < 0.1 * still_s or still_s > SPIN_S:
                    raise HangError(
                        f"deadlock: every rank waits, and nothing has moved for {still_s:.0f} s.\n{self.table.report()}"
                    )

    def _wait(self, timeout_s: float) -> list[int]:
        """Ranks that said something or died."""
        watched = {}
        for rank in range(self.size):
            if rank not in self.done:
                watched[self.conns[rank]] = watched[self.processes[rank].sentinel] = rank
        return sorted({watched[x] for x in connection.wait(list(watched), timeout_s)})

    def _hear(self, rank: int) -> None:
        """Take in how a rank ended; if it failed, find the cause and raise it.

        Another rank may be the cause, as those that lost a peer are never to blame; and where several failed alike,
        the first in rank order speaks.
        """
        outcomes, began = {rank: self._outcome(rank)}, time.monotonic()
        self.done.add(rank)
        if outcomes[rank] is not None and outcomes[rank].kind == "ok":
            return
        while len(self.done) < self.size:
            known = any(map(_is_cause, outcomes.values()))
            if time.monotonic() - began > (ALIKE_S if known else GRACE_S):
                break
            outcomes |= {r: self._outcome(r) for r in self._wait(0.02)}
            self.done |= outcomes.keys()
        cause = next((r for r, outcome in outcomes.items() if _is_cause(outcome)), rank)
        cause = min((r for r, outcome in outcomes.items() if _alike(outcome, outcomes[cause])), default=cause)
        raise self._error(cause, outcomes[cause])

    def _outcome(self, rank: int):
        try:
            return self.conns[rank].recv() if self.conns[rank].poll() else None
        except (EOFError, OSError):
            return None

    def _error(self, rank: int, outcome) -> Exception:
        who = f"rank {rank} of {self.size}"
        if outcome is None:
            self.processes[rank].join(1)
            return RankError(f"{who} {_death(self.processes[rank].exitcode)}{self._last_noise(rank)}", rank)
        if outcome.kind == "mismatch":
            return watch.MismatchError(outcome.text)
        return RankError(f"{who} {outcome.text}", rank, outcome.error)

    def _timeout(self, timeout_s: float) -> str:
        """Where each rank was when its time was up."""
        lines = [f"the ranks were not done after {timeout_s:g} s (timeout_s). They were here:", self.table.report()]
        busy = sorted(set(range(self.size)) - self.done)
        for rank in busy:
            with contextlib.suppress(OSError):
                self.conns[rank].send("where")
        until = time.monotonic() + 1
        for rank in busy:
            with contextlib.suppress(Exception):  # it may be ending just now, and say something else
                if self.conns[rank].poll(max(0.0, until - time.monotonic())):
                    lines.append(f"rank {rank}:\n{self.conns[rank].recv().rstrip()}")
        return "\n".join(lines)

    def _busy_s(self) -> float:
        """Processor seconds that the ranks have used, where the system tells."""
        ticks = 0
        for process in self.processes:
            with contextlib.suppress(OSError), open(f"/proc/{process.pid}/stat") as file:
                fields = file.read().rsplit(")", 1)[1].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK") if ticks else 0.0

    def _read(self, name: str) -> str:
        with contextlib.suppress(OSError), open(os.path.join(self.folder, name), "rb") as file:
            return file.read().decode(errors="replace")
        return ""

    def _last_noise(self, rank: int) -> str:
        """What C++ and Python's fault handler said at last, up to the machine's own frames."""
        lines = [line for line in self._read(f"noise{rank}").splitlines() if line.strip()]
        ours = (f'  File "{os.path.join(_HERE, "rank.py")}"', "Extension modules:")
        said = list(itertools.takewhile(lambda line: not line.startswith(ours), lines))
        return "".join(f"\n  {line}" for line in said[-8:])

    def _rank_0(self) -> str:
        """What rank 0 has printed since this was last asked."""
        with contextlib.suppress(OSError), open(os.path.join(self.folder, "out0"), "rb") as file:
            file.seek(self.printed)
            new = file.read()
            self.printed += len(new)
            return self._labelled(0, self.decoder.decode(new))
        return ""

    def _labelled(self, rank: int, text: str) -> str:
        """The text, each line beginning with whose it is; it comes after what was labelled before."""
        if not text:
            return ""
        goes_on = rank == 0 and not self.at_line_start
        start = r"(?<=[\n\r])(?=[^\n\r])" if goes_on else r"(?:^|(?<=[\n\r]))(?=[^\n\r])"
        before = "" if self.at_line_start or goes_on else "\n"
        self.at_line_start = text[-1] in "\n\r"
        return before + re.sub(start, f"rank {rank} | ", text)

    def _show(self, text: str) -> None:
        if text:
            encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
            sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
            sys.stdout.flush()

    def end(self) -> None:
        """End all ranks with all that they started, and wait until they are gone."""
        with _uninterrupted():
            for process in self.processes:
                if process.pid is not None:
                    with contextlib.suppress(OSError, AttributeError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.kill()
            for process, conn in zip(self.processes, self.conns, strict=True):
                conn.close()
                if process.pid is not None:
                    process.join()
                process.close()


def _is_cause(outcome) -> bool:
    return outcome is None or outcome.kind in ("error", "mismatch")


def _alike(one, other) -> bool:
    return None not in (one, other) and (one.kind, one.error) == (other.kind, other.error)


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = "; was the machine out of memory?" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"
    return f"left without returning (os._exit?), with exit code {code}"


@contextlib.contextmanager
def _without_main():
    """Ranks need nothing of the caller's script: functions travel by value, so it is never run again in a rank."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _uninterrupted():
    """A Ctrl-C comes after the body: nothing is left half started, or half ended."""
    if threading.current_thread() is not threading.main_thread():  # which gets the Ctrl-C
        yield
        return
    came: list[tuple] = []
    before = signal.signal(signal.SIGINT, lambda *args: came.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came and callable(before):
            before(*came[0])


def start_server():
    """The multiprocessing context that ranks come from: a fork server that knows today's `lib`, or `spawn`."""
    global _server_is_of
    method = os.environ.get("LIB_START") or ("forkserver" if hasattr(os, "fork") else "spawn")
    context = multiprocessing.get_context(method)
    if method != "forkserver":
        return context
    newest = max(os.stat(path).st_mtime for path in glob.glob(os.path.join(_HERE, "**", "*.py"), recursive=True))
    environment = {  # only the server's: a rank gets its own from `launch`
        "PYTHONPATH": os.pathsep.join([os.path.dirname(_HERE), *sys.path]),
        "PYTHONSAFEPATH": "1",  # another folder called lib may be here
        "OMP_NUM_THREADS": "1",
    }
    resource_tracker.ensure_running()  # now, as it would unblock the signal that we block
    with _one_at_a_time, _environment(**environment), _without_main(), _blocked(signal.SIGINT):
        if newest > _server_is_of and _server_is_of:
            forkserver._forkserver._stop()  # it holds the code of before the edit
        _server_is_of = newest
        context.set_forkserver_preload(
            ["lib.rank", "torch._dynamo"]
        )  # which an optimizer's first step imports, 1.5 s
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _blocked(number: int):
    """A process that the body starts never sees this signal: a Ctrl-C is for us, who end the ranks."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _environment(**values: str):
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
