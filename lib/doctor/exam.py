"""One examination: of the ranks that torchrun started, or of ranks on this machine.

The problem: a rank that does not come, or stops, would hang the doctor, too. The idea: what ends a run that hangs
(`impatient.py`, `lib.launch.run`) ends the examination, with less patience, and says whom the others wait for.
Whatever happens, the page shows what was known until then.
"""

from dataclasses import replace
from pathlib import Path

from lib import comm
from lib.doctor.expected import Expected
from lib.doctor.impatient import START_S, Impatient
from lib.doctor.links import examine
from lib.doctor.page import Examination
from lib.doctor.settings import Finding, described, judge_settings
from lib.doctor.transport import ask_nccl
from lib.launch import HangError, MismatchError, RankError, RunTimeout, close, run
from lib.mesh import Group, MeshShape
from lib.runtime.hang import named_ranks
from lib.torchrun.meeting import Member, choose_interface, roster
from lib.torchrun.start import StartError, choose_backend, connect
from lib.torchrun.watchdog import Ending

LIMIT_S, RUN_S = 15.0, 75.0  # of one call; of all calls
KINDS = {
    HangError: "hang",
    RunTimeout: "hang",
    MismatchError: "mismatch",
    RankError: "died",
    StartError: "connection",
}


def examined(world: Group, shape: MeshShape, expected: Expected | None = None) -> Examination:
    """Examine ranks of one machine; all call it, and all return the same."""
    report = Examination([None] * world.size, "gloo", expected=expected or Expected())
    report.members = comm.all_gather_object(Member(settings=described()), world)
    report.findings += judge_settings(dict(enumerate(report.members)))
    _measure_into(report, world, shape, None)
    return report


def on_this_machine(shape: MeshShape, expected: Expected | None = None) -> Examination:
    """Start ranks here, and examine them."""
    report = Examination([None] * shape.size, "gloo", expected=expected or Expected())
    given = (shape, expected) if expected else (shape,)
    try:
        return replace(run(examined, shape.size, *given, timeout_s=RUN_S)[0], began_s=report.began_s)
    except tuple(KINDS) as error:
        report.findings.append(Finding(KINDS[type(error)], error.ranks, str(error)))
    return report


def under_torchrun(
    rank: int, size: int, shape: MeshShape, path: str | None, expected: Expected | None = None
) -> Examination:
    """Examine the ranks that torchrun started; `path` is for `tell`, should this process have to end there."""
    report = Examination([None] * size, choose_backend(), expected=expected or Expected())
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
    nccl_log = ask_nccl() if report.backend == "nccl" else None
    network = choose_interface(rank, report.members)
    watchdog = Impatient(report, path, store, rank, report.members, LIMIT_S, network)
    try:
        world = connect(report.backend, store, watchdog)
        _measure_into(report, world, shape, nccl_log)
        close(world, None)
    except (MismatchError, StartError) as error:
        watchdog.end(Ending(str(error), error.ranks, KINDS[type(error)]))
    except RuntimeError as error:  # mostly of gloo: a connection broke
        watchdog.end(watchdog.who_died((str(error) or type(error).__name__).splitlines()[0]))
    return report


def _measure_into(report: Examination, world: Group, shape: MeshShape, nccl_log: Path | None) -> None:
    """Measure, and enter it into the report; all ranks call it."""
    report.measured, report.transports, judgement = examine(world, shape, report.members, report.expected, nccl_log)
    report.findings += judgement.findings
    report.not_judged += judgement.not_judged
