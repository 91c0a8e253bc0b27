"""One examination, from the first rank that starts to the page: by torchrun, or of ranks on this machine.

The problem: what is looked for, a rank that does not come, one that stops, a call that differs, would hang the doctor,
too. The idea: it relies on what ends a run that hangs (`lib.torchrun.watchdog`, `lib.launch.run`), with less patience,
and says whom the others waited for. Whatever happens, the page shows what was known until then.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Sequence

import torch.distributed as dist

from lib.doctor.links import examine
from lib.doctor.page import Report, tell
from lib.doctor.settings import Finding, described, judge_settings
from lib.launch import HangError, MismatchError, RankError, RunTimeout, close, run
from lib.mesh import Group, MeshShape
from lib.runtime.call_table import CallTable, mismatch
from lib.runtime.hang import STARTING, named_ranks
from lib.torchrun.meeting import Member, choose_interface, roster
from lib.torchrun.start import StartError, choose_backend, connect
from lib.torchrun.watchdog import Verdict, Watchdog

START_S, LIMIT_S, RUN_S = 25.0, 12.0, 45.0  # for all ranks to come; of one call; of all calls
COMPARED = 8  # calls of each group: they come before those that are timed


def examined(world: Group, shape: MeshShape, report: Report | None = None) -> Report:
    """Examine ranks that are connected; all call it, and all return the same.

    Args:
        report: what is known of the ranks; without it, they are on one machine, and exchange their settings here.
    """
    if report is None:
        members = [Member(settings=described())] * world.size
        if world.size > 1:
            dist.all_gather_object(members, members[world.rank])
        report = Report(members, dist.get_backend() if world.size > 1 else "gloo")
        report.findings += judge_settings(dict(enumerate(members)))
    report.measured, found = examine(world, shape, report.members)
    report.findings += found
    return report


def on_this_machine(shape: MeshShape) -> Report:
    """Start ranks here, and examine them."""
    report = Report([None] * shape.size, "gloo")
    try:
        return run(examined, shape.size, shape, timeout_s=RUN_S)[0]
    except (HangError, RunTimeout) as error:
        report.findings.append(hang(error.awaited, str(error)))
    except MismatchError as error:
        report.findings.append(Finding("mismatch", error.ranks, str(error)))
    except RankError as error:
        report.findings.append(Finding("died", (error.rank,), str(error)))
    return report


def hang(ranks: tuple[int, ...], report: str) -> Finding:
    """The finding for ranks that the others wait for."""
    return Finding("hang", ranks, f"the others wait for {named_ranks(ranks)}. {report}" if ranks else report)


def under_torchrun(rank: int, size: int, shape: MeshShape, path: str | None) -> Report:
    """Examine the ranks that torchrun started; `path` is for `tell`, should this process have to end at once.

    If a rank fails, torchrun ends the others: that, too, is a finding.
    """
    backend = choose_backend()
    try:
        store, members = roster(rank, size, described(), "", START_S)
    except StartError as error:
        return Report([None] * size, backend, findings=[Finding("missing", error.missing, str(error))])
    report = Report(members, backend)
    if missing := tuple(i for i, one in enumerate(members) if one is None):
        text = f"{named_ranks(missing)} of {size} did not come within {START_S:.0f} s: see what torchrun says there"
        report.findings.append(Finding("missing", missing, text))
    report.findings += judge_settings({i: one for i, one in enumerate(members) if one})
    if not missing:
        bedside = Bedside(report, path, store, rank, members, LIMIT_S, choose_interface(rank, members))
        try:
            world = connect(backend, store, bedside)
            close(world, examined(world, shape, report))
        except MismatchError as error:
            bedside.end(Finding("mismatch", error.ranks, str(error)))
        except StartError as error:
            bedside.end(Finding("connection", (rank,), str(error)))
        except RuntimeError as error:  # of gloo or NCCL, if a peer is gone
            bedside.lost(str(error).splitlines()[0])
    return report


class Bedside(Watchdog):
    """A watchdog with less patience, that prints the page; on the first rank of all that must end."""

    beat_s, silent_s, still_s, start_s = 0.5, 8.0, 8.0, START_S

    def __init__(self, report: Report, path: str | None, store: dist.Store, *watched: object) -> None:
        self.report, self.path = report, path
        super().__init__(store, *watched)
        self.table = ComparedTable(store, len(self.members), self.rank)
        self.table.state(STARTING)
        signals, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write)  # is told at once; a handler would wait until a call of gloo ends
        signal.signal(signal.SIGTERM, lambda *_: None)
        threading.Thread(target=self._obey, args=(signals,), daemon=True).start()

    def _obey(self, signals: int) -> None:
        os.read(signals, 1)
        self.lost("torchrun ends the ranks, as it does if one fails")

    def lost(self, why: str) -> None:
        """End this process because a rank is gone: the one that writes no row any more."""
        before = self.beats()
        time.sleep(4 * self.beat_s)
        gone = tuple(rank for rank, (a, b) in enumerate(zip(before, self.beats(), strict=True)) if a == b)
        self.end(Finding("died", gone, f"{named_ranks(gone) if gone else 'a rank'} ended: {why}"))

    def tell(self, verdict: Verdict) -> None:
        if self.table.row(self.rank).state == STARTING:
            self.say(Finding("connection", verdict.ranks, verdict.text))
        else:
            self.say(hang(verdict.ranks, verdict.text))

    def end(self, finding: Finding) -> None:
        """Print the page with this finding, and end this process, and the others."""
        self.say(finding)
        self._leave(self.give_up(Verdict(finding.text, finding.ranks)))

    def say(self, finding: Finding) -> None:
        if self.first("told"):
            self.report.findings.append(finding)
            tell(self.report, self.path)


class ComparedTable(CallTable):
    """A call table of one rank that compares its first calls through the store, whatever machine the others are on."""

    def __init__(self, store: dist.Store, size: int, rank: int) -> None:
        super().__init__(None, size, rank)
        self._store = store

    def call(self, channel: str, members: Sequence[int], what: str, where: str, due_s: float = 0.0) -> int:
        number = super().call(channel, members, what, where, due_s)
        if number < COMPARED:
            mine = json.dumps([self.rank, what, where])
            first, its, there = json.loads(self._store.compare_set(f"{channel} call {number}", "", mine))
            if its != what:
                raise mismatch(number, {first: (its, there), self.rank: (what, where)})
        return number
