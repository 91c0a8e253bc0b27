"""One examination: of the ranks that torchrun started, or of ranks on this machine.

The problem: a rank that does not come, or stops, would hang the doctor, too. The idea: what ends a run that hangs
(`lib.torchrun.watchdog`, `lib.launch.run`) ends the examination, with less patience, and says whom the others wait for.
Whatever happens, the page shows what was known until then.
"""

from dataclasses import replace

import torch.distributed as dist

from lib.doctor.links import examine
from lib.doctor.page import Examination, tell
from lib.doctor.settings import Finding, described, judge_settings
from lib.launch import HangError, MismatchError, RankError, RunTimeout, close, run
from lib.mesh import Group, MeshShape
from lib.runtime.hang import named_ranks
from lib.torchrun.meeting import Member, choose_interface, roster
from lib.torchrun.start import StartError, choose_backend, connect
from lib.torchrun.watchdog import Ending, Watchdog

START_S, LIMIT_S, RUN_S = 25.0, 15.0, 45.0  # for all ranks to come; of one call; of all calls
KINDS = {
    HangError: "hang",
    RunTimeout: "hang",
    MismatchError: "mismatch",
    RankError: "died",
    StartError: "connection",
}


def examined(world: Group, shape: MeshShape) -> Examination:
    """Examine ranks of one machine; all call it, and all return the same."""
    report = Examination([Member(settings=described())] * world.size, "gloo")
    if world.size > 1:
        dist.all_gather_object(report.members, report.members[world.rank])
    report.measured, findings = examine(world, shape, report.members)
    report.findings += judge_settings(dict(enumerate(report.members))) + findings
    return report


def on_this_machine(shape: MeshShape) -> Examination:
    """Start ranks here, and examine them."""
    report = Examination([None] * shape.size, "gloo")
    try:
        return replace(run(examined, shape.size, shape, timeout_s=RUN_S)[0], began_s=report.began_s)
    except tuple(KINDS) as error:
        report.findings.append(Finding(KINDS[type(error)], error.ranks, str(error)))
    return report


def under_torchrun(rank: int, size: int, shape: MeshShape, path: str | None) -> Examination:
    """Examine the ranks that torchrun started; `path` is for `tell`, should this process have to end there."""
    report = Examination([None] * size, choose_backend())
    try:
        store, report.members = roster(rank, size, described(), "", START_S)
    except StartError as error:
        report.findings.append(Finding("missing", error.ranks, str(error)))
        return report
    report.findings += judge_settings({i: member for i, member in enumerate(report.members) if member})
    if missing := tuple(i for i, member in enumerate(report.members) if member is None):
        text = f"{named_ranks(missing)} of {size} did not come within {START_S:.0f} s: see what torchrun says there"
        report.findings.append(Finding("missing", missing, text))
        return report
    network = choose_interface(rank, report.members)
    watchdog = Impatient(report, path, store, rank, report.members, LIMIT_S, network)
    try:
        world = connect(report.backend, store, watchdog)
        report.measured, findings = examine(world, shape, report.members)
        report.findings += findings
        close(world, None)
    except (MismatchError, StartError) as error:
        watchdog.end(Ending(str(error), error.ranks, KINDS[type(error)]))
    return report


class Impatient(Watchdog):
    """A watchdog that prints the page, on the first rank of all that ends."""

    beat_s, silent_s, still_s, start_s = 0.5, 8.0, 8.0, START_S

    def __init__(self, report: Examination, path: str | None, *watched: object) -> None:
        self.report, self.path = report, path
        super().__init__(*watched)

    def tell(self, ending: Ending) -> None:
        if self.first("told"):
            self.report.findings.append(Finding(ending.kind, ending.ranks, ending.text))
            tell(self.report, self.path)
