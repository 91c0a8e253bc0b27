"""Which rank is slow while it multiplies for seconds, and where a busy machine forbids to say so."""

from collections.abc import Mapping, Sequence
from statistics import median_low

from lib.doctor.expected import Expected
from lib.doctor.judgement import Judgement
from lib.doctor.products import Ran
from lib.doctor.settings import Finding
from lib.runtime.hang import named_ranks
from lib.torchrun.meeting import Member

STOOD = 0.2  # of its turn
TIMES = 1.5  # as slow as the middle of the others
LEAST_OF_EXPECTED = 0.5


def judge_ranks(ran: Mapping[int, Ran], members: Sequence[Member], expected: Expected) -> Judgement:
    """Ranks that stood still, ranks that are slower than the others, and what could not be compared."""
    judgement = Judgement()
    stood = {rank: its for rank, its in ran.items() if its.stood_s > STOOD * its.wall_s}
    for rank, its in stood.items():
        judgement.findings.append(
            Finding("slow", (rank,), f"rank {rank} on {members[rank].host} {_why_it_stood(its)}")
        )
    busy = {rank: its for rank, its in ran.items() if its.is_busy and rank not in stood}
    if busy:
        judgement.not_judged.append(_busy_text(busy, members))
    unseen = [rank for rank, its in ran.items() if not its.on_gpu and its.waited_s is None]
    if unseen:
        text = f"whether something stops {named_ranks(unseen)}: this system does not count how long a process waits"
        judgement.not_judged.append(text)
    quiet = {rank: its.speed for rank, its in ran.items() if rank not in stood and rank not in busy}
    for rank, speed in quiet.items():
        others = [other for another, other in quiet.items() if another != rank]
        if others and TIMES * speed < (usual := median_low(others)):
            text = (
                f"rank {rank} on {members[rank].host} is slow: {speed / 1e9:,.3g} GFLOP/s in {ran[rank].wall_s:.1f}"
            )
            text += f" s of products, and {usual / 1e9:,.3g} elsewhere"
            judgement.findings.append(Finding("slow", (rank,), text))
    _compare_expected(judgement, ran, expected)
    return judgement


def _why_it_stood(its: Ran) -> str:
    """How long a rank stood still, and the likely reason."""
    text = f"is slow: in {its.wall_s:.1f} s of products it stood still for {100 * its.stood_s / its.wall_s:.0f} %"
    if its.throttled_s > its.stood_s / 2:
        return f"{text}, held back by a CPU quota (cpu.max of its cgroup, docker --cpus, limits.cpu of its pod)"
    return f"{text}, though no other program had its processor: something stops it, or it sleeps, or it swaps"


def _busy_text(busy: Mapping[int, Ran], members: Sequence[Member]) -> str:
    """Which rank speeds are not judged, with the numbers."""
    worst = max(busy, key=lambda rank: busy[rank].waited_s or 0.0)
    its, hosts = busy[worst], ", ".join(dict.fromkeys(members[rank].host for rank in busy))
    text = f"rank speeds: busy machine {hosts}, load {its.load:.1f} on {its.cores} cores"
    if its.waited_s is None:
        return text
    part = f"{100 * its.waited_s / its.wall_s:.0f} % of {its.wall_s:.1f} s"
    return f"{text}: other programs kept {named_ranks([*busy])} from a processor, rank {worst} for {part}"


def _compare_expected(judgement: Judgement, ran: Mapping[int, Ran], expected: Expected) -> None:
    """Compare GPUs with the table, if the reader named one."""
    if not expected.flops:
        return
    if no_gpu := tuple(rank for rank, its in ran.items() if not its.on_gpu):
        text = f"{named_ranks(no_gpu)} compute on the CPU, and {expected.gpu_said} was given: torch sees no GPU"
        judgement.findings.append(Finding("slow", no_gpu, f"{text}; compare torch.version.cuda and nvidia-smi there"))
    slow = {
        rank: its.flops for rank, its in ran.items() if its.on_gpu and its.flops < LEAST_OF_EXPECTED * expected.flops
    }
    for rank, flops in slow.items():
        text = f"rank {rank} is slow: {flops / 1e12:.0f} TFLOP/s in 16 bit, and {expected.gpu_said} can reach"
        judgement.findings.append(Finding("slow", (rank,), f"{text} {expected.flops / 1e12:.0f}"))
