"""The processes of one run: started, watched, and always ended.

The problem: one of four ranks fails, and three report "connection closed by peer"; or no rank fails, and all wait. The
reader needs one sentence with the cause, after a second, and no process left running.
The idea: ranks are forked from a server that already imported torch (`server.py`). This side polls: messages from
ranks, whether they are alive, their output, their calls so far (`call_table.py`), and free memory (`headroom.py`). A
rank that lost a peer is never the cause. `hang.py` decides whether the ranks hang.
"""

import contextlib
import itertools
import os
import signal
import sys
import time
from multiprocessing import Pipe, connection
from pathlib import Path
from typing import Any

from lib.runtime import asserts, headroom, output
from lib.runtime.call_table import CallTable
from lib.runtime.errors import RankError, RunError, RunTimeout
from lib.runtime.fork_server import ForkServer
from lib.runtime.hang import STARTING, HangError, Stillness
from lib.runtime.places import LIB
from lib.runtime.server import starting, uninterrupted, why_no_rank

START_S = 60.0  # the longest start: it takes seconds on a busy machine, and forever if an argument never arrives
GRACE_S = 0.5  # after a failure, how long to listen for the rank that caused it and for equal failures
NOISE_BYTES = headroom.MB  # of output that bypasses Python's stdout; a longer file is emptied


class Ranks:
    """The processes of one run."""

    def __init__(self, world_size: int, folder: str, table: CallTable) -> None:
        self.folder, self.table, self.size = Path(folder), table, world_size
        self.processes: list[Any] = []
        self.conns: list[connection.Connection] = []
        self.questions: list[connection.Connection] = []
        self.done: set[int] = set()
        self.output = output.Reader(folder, world_size)
        memory = headroom.system_memory()
        self.floor_bytes = memory.floor_bytes() if memory else 0.0
        self.pause_s = 0.05  # between two looks

    def start(self, server: ForkServer) -> None:
        """Let the server fork them."""
        from lib.runtime import worker

        cwd = None  # if it was removed, ranks stay in the folder of their server
        with contextlib.suppress(OSError):
            cwd = os.getcwd()
        paths = [path for path in sys.path if isinstance(path, str)]
        place = paths, sys.argv, cwd, dict(os.environ), asserts.modules_of_tests()
        with starting():
            for rank in range(self.size):
                (ours, theirs), (asks, answers) = Pipe(), Pipe()
                args = (rank, self.size, str(self.folder), place, theirs, answers)
                self.processes.append(server.Process(target=worker.rank_main, args=args, daemon=True))
                self.conns.append(ours)
                self.questions.append(asks)
                try:
                    self.processes[rank].start()
                except (EOFError, ConnectionError):
                    raise RunError(f"the server that ranks come from could not start; {why_no_rank()}") from None
                theirs.close()
                answers.close()

    def join(self, timeout_s: float) -> None:
        """Wait until all are done, or raise the error; in both cases show the output. The limit is for the function."""
        __tracebackhide__ = True  # by pytest, as in `run`
        begun, deadline = False, time.monotonic() + START_S + timeout_s
        stillness = Stillness((process.pid for process in self.processes), self._may_send)
        try:
            while len(self.done) < self.size:
                ready = self._wait(self.pause_s)
                self.output.show_rank_0()
                for rank in ready:
                    self._hear(rank)
                self._watch_headroom()
                heads = self.table.heads()
                if not begun and all(state != STARTING for state, _ in heads):
                    begun, deadline = True, time.monotonic() + timeout_s
                if still_s := stillness.look(heads):
                    raise self._hang(still_s)
                if time.monotonic() > deadline and not stillness.since_before(deadline):  # a hang says more
                    raise self._timeout(timeout_s)
        finally:
            self.output.show_all()

    def _wait(self, timeout_s: float) -> list[int]:
        """Ranks that sent a message or died."""
        watched = {}
        for rank in range(self.size):
            if rank not in self.done:
                watched[self.conns[rank]] = watched[self.processes[rank].sentinel] = rank
        return sorted({watched[x] for x in connection.wait(list(watched), timeout_s)})

    def _hear(self, rank: int) -> None:
        """Receive how a rank ended; if it failed, raise the cause: of equal failures, the first in rank order."""
        __tracebackhide__ = True
        outcomes, began = {rank: self._outcome(rank)}, time.monotonic()
        self.done.add(rank)
        if outcomes[rank] == ("ok", None):
            return
        while len(self.done) < self.size and time.monotonic() - began < GRACE_S:
            outcomes |= {r: self._outcome(r) for r in self._wait(0.02)}
            self.done |= outcomes.keys()
        kinds = {r: (kind, getattr(error, "error", "") if error else r) for r, (kind, error) in outcomes.items()}
        cause = next((r for r, (kind, _) in kinds.items() if kind in ("died", "error")), rank)
        cause = min(r for r, kind in kinds.items() if kind == kinds[cause])
        raise outcomes[cause][1] or self._died(cause)

    def _outcome(self, rank: int) -> tuple[str, Exception | None]:
        """How a rank ended: `ok`, `error`, `peer gone` or `died`; and the error that it sent."""
        with contextlib.suppress(EOFError, OSError):
            if self.conns[rank].poll():
                return self.conns[rank].recv()
        return "died", None

    def _died(self, rank: int) -> RunError:
        """The error of a rank that could say nothing."""
        self.processes[rank].join(1)
        who = f"rank {rank} of {self.size}"
        if not self._noise(rank).exists():
            return RunError(f"{who} could not start; {why_no_rank()}")
        return RankError(f"{who} {self._death(rank)}{self._last_noise(rank)}", rank)

    def _hang(self, still_s: float) -> HangError:
        """The error with the report of a hang."""
        if unreadable := self._unreadable():
            return HangError(f"hang: the ranks wait. Nothing has moved for {still_s:.0f} s.\n{unreadable}")
        view = self.table.view()
        return HangError(view.explain(still_s), view)

    def _timeout(self, timeout_s: float) -> RunTimeout:
        """The error with the place where each rank was when the time limit passed."""
        view = None if (report := self._unreadable()) else self.table.view()
        lines = [f"the ranks were not done after {timeout_s:g} s (timeout_s). They were here:"]
        lines.append(view.report() if view else report)
        stacks = {rank: stack.rstrip() for rank, (stack, _) in self._ask().items() if rank not in self.done}
        error = RunTimeout("\n".join(lines + [f"rank {rank}:\n{stack}" for rank, stack in stacks.items()]))
        error.ranks = view.awaited if view else ()
        error.held_bytes = sum(headroom.held_bytes(process.pid) for process in self.processes)
        return error

    def _ask(self) -> dict[int, tuple[str, bool]]:
        """For each rank that answers: where its threads are, and whether one may still send."""
        for conn in self.questions:
            with contextlib.suppress(OSError):
                while conn.poll():
                    conn.recv()  # a late answer to an earlier question
                conn.send("where")
        until, answers = time.monotonic() + 1, {}
        for rank, conn in enumerate(self.questions):
            with contextlib.suppress(EOFError, OSError):
                if conn.poll(max(0.0, until - time.monotonic())):
                    answers[rank] = conn.recv()
        return answers

    def _may_send(self) -> bool:
        """Whether a rank may still send from a thread; one that does not answer holds the interpreter, and may."""
        answers = self._ask()
        return len(answers) < self.size or any(free for _, free in answers.values())

    def _unreadable(self) -> str:
        """Why the call table cannot be read, or "". On a full disk, reading a page that was never written kills."""
        if headroom.free_disk_bytes(self.folder) >= headroom.MB:
            return ""
        return headroom.full_disk(self.folder.parent, "the table of waiting ranks cannot be read")

    def _watch_headroom(self) -> None:
        """End the ranks before memory runs out, or the system might end the notebook; keep files of noise short."""
        __tracebackhide__ = True
        for rank in range(self.size):
            with contextlib.suppress(OSError):
                if self._noise(rank).stat().st_size > NOISE_BYTES:
                    os.truncate(self._noise(rank), 0)
        if (memory := headroom.system_memory()) is None:
            return
        self.pause_s = 0.05 if memory.free_bytes > 2 * self.floor_bytes else 0.01  # a rank can take 1 GB in 0.2 s
        if memory.free_bytes > self.floor_bytes:
            return
        held = [headroom.held_bytes(process.pid) for process in self.processes]
        if sum(held) < self.floor_bytes:
            return  # a different program uses it: ending the ranks would not help
        rank = held.index(max(held))
        with contextlib.suppress(OSError):
            os.kill(self.processes[rank].pid, signal.SIGABRT)  # frees its memory, and prints where it was
        self.processes[rank].join(1)
        rows = "".join(f"\n  rank {r} held {headroom.size_text(n)}" for r, n in enumerate(held))
        raise RankError(
            f"rank {rank} of {self.size} was ended before memory ran out: {memory}.{rows}\n"
            f"Use smaller tensors or fewer ranks.{self._last_noise(rank)}",
            *(rank, "MemoryError"),
        )

    def _death(self, rank: int) -> str:
        code = self.processes[rank].exitcode
        if code is None or code >= 0:
            return f"exited without returning (os._exit?), with exit code {code}"
        hint = ""
        if -code == signal.SIGKILL:
            hint = "; was the machine out of memory?"
        if -code == signal.SIGBUS:
            full = f"is its disk full? {headroom.size_text(headroom.free_disk_bytes(self.folder))} free"
            hint = f"; ranks share memory through a file in {self.folder.parent}: {full}"
        named = -code in {*signal.Signals}  # not every signal has a name
        return f"was killed by {signal.Signals(-code).name if named else -code}{hint}"

    def _noise(self, rank: int) -> Path:
        return self.folder / f"noise{rank}"

    def _last_noise(self, rank: int) -> str:
        """The last output of C++ and of Python's fault handler, without the frames of this library."""
        said = ""
        with contextlib.suppress(OSError):
            said = self._noise(rank).read_text("utf-8", "replace")
        ours = (f'  File "{os.path.join(LIB, "runtime", "worker.py")}"', "Extension modules:")
        lines = itertools.takewhile(lambda line: not line.startswith(ours), filter(str.strip, said.splitlines()))
        return "".join(f"\n  {line}" for line in [*lines][-8:])

    def end(self) -> None:
        """End all ranks and all processes that they started, and wait until they have ended."""
        with uninterrupted():
            for process in self.processes:
                if process.pid is not None:
                    with contextlib.suppress(OSError, AttributeError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.kill()
            for process, *conns in zip(self.processes, self.conns, self.questions, strict=True):
                for conn in conns:
                    conn.close()
                if process.pid is not None:
                    process.join()
                process.close()
