"""What the rounds of an examination measured, and what in it is slower than its likes.

The problem: one bad cable, or one throttled processor, slows all ranks, and no rank sees which. And where other
programs run, any message may take ten times as long as usual.
The idea: a link is slow if even its good rounds are slow beside the middle of its likes, those within a host or those
between hosts. If most links of a rank are slow, it is the rank. Whether *all* are too slow, this cannot see
(`plausible.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low, quantiles

from lib import cost
from lib.doctor.products import Ran
from lib.doctor.settings import Finding
from lib.torchrun.meeting import Member

SLOW = {"latency": 4.0, "transfer": 2.0, "compute": 1.5}  # times as slow as their likes
MOST_OF_ITS_LINKS = 0.7  # of so many: the rank is slow
LEAST_CLOCK_S = 0.1  # NTP keeps clocks within milliseconds


@dataclass
class Measurement:
    """The seconds of each round, of all ranks.

    Args:
        seconds: by what was measured: ("latency", a, b), a < b: one way of 8 bytes; ("transfer", a, b): of `size` bytes
            from a to b; ("compute", rank): of its matmuls; ("all_reduce", axis, ranks): of `size` bytes.
        ahead_s: rank → by how much its clock is ahead of that of rank 0.
        size: bytes of a large message.
        ran: rank → how it ran while it multiplied for seconds; empty if that was not measured.
    """

    seconds: dict[tuple, list[float]]
    ahead_s: dict[int, float]
    size: int
    ran: dict[int, Ran] = field(default_factory=dict)

    def of(self, kind: str) -> dict[tuple, list[float]]:
        """The seconds of one kind; the keys are what follows the kind."""
        return {key[1:]: values for key, values in self.seconds.items() if key[0] == kind}

    def good(self, kind: str) -> dict[tuple, float]:
        """The lower quartile of each: the seconds of a round that nothing disturbs."""
        return {key: quantiles(values, n=4)[0] for key, values in self.of(kind).items()}

    def speeds(self, members: Sequence[Member], *, within: bool) -> dict[tuple[int, int], float]:
        """(sender, receiver) → bytes per second, of the links within a host, or of those between hosts."""
        on = [member.machine for member in members]
        good = self.good("transfer").items()
        return {(a, b): self.size / s for (a, b), s in good if (on[a] == on[b]) is within}

    def model_s(self, ranks: Sequence[int]) -> float:
        """Seconds of an all-reduce by `lib.cost`, if all links of the ring were as its slowest link."""
        links = (self.good(kind).items() for kind in ("latency", "transfer"))
        alpha_s, large_s = (max(s for pair, s in some if {*pair} <= {*ranks}) for some in links)
        return cost.comm_s("all_reduce", self.size, len(ranks), alpha_s, self.size / large_s)

    def judge(self, members: Sequence[Member]) -> list[Finding]:
        """Links, ranks and clocks that look wrong beside the others."""
        bad, on = {}, [member.machine for member in members]  # `bad`: set of two ranks → why
        for kind, what in (("transfer", f"{self.size >> 20} MiB"), ("latency", "8 bytes")):
            for within, where in ((True, "within a host"), (False, "between hosts")):
                likes = {(a, b): s for (a, b), s in self.of(kind).items() if (on[a] == on[b]) is within}
                for (a, b), why in outliers(likes, SLOW[kind]).items():
                    bad.setdefault(frozenset((a, b)), f"a message of {what} from {a} to {b} takes {why} {where}")
        slow = {r: f"its matmuls take {why}" for (r,), why in outliers(self.of("compute"), SLOW["compute"]).items()}
        for rank in range(len(members)):
            its, ill = (sum(rank in pair for pair in some) for some in (self.of("latency"), bad))
            if its > 1 and ill >= MOST_OF_ITS_LINKS * its:
                slow.setdefault(rank, f"{ill} of its {its} links are; {next(bad[p] for p in bad if rank in p)}")
        findings = [Finding("slow", (r,), f"rank {r} on {members[r].host} is slow: {why}") for r, why in slow.items()]
        for (a, b), why in ((sorted(pair), why) for pair, why in bad.items() if not slow.keys() & pair):
            findings.append(Finding("link", (a, b), f"the link of ranks {a} and {b} is slow: {why}"))
        text = "the clock of rank {} differs by {:+.2f} s from the clock of rank 0: start NTP on its host"
        far = {rank: by_s for rank, by_s in self.ahead_s.items() if abs(by_s) > LEAST_CLOCK_S}
        return findings + [Finding("clock", (rank,), text.format(rank, by_s)) for rank, by_s in far.items()]


def outliers(seconds: Mapping[tuple, Sequence[float]], factor: float) -> dict[tuple, str]:
    """Those whose lower quartile is above `factor` times the middle of the others; how slow they are, in words."""
    middles, slow = {key: median(values) for key, values in seconds.items()}, {}
    for key, values in seconds.items():
        others = [middle for other, middle in middles.items() if other != key]
        if len(others) > 1 and quantiles(values, n=4)[0] > factor * median_low(others):
            slow[key] = f"{middles[key] * 1e3:.3g} ms, and {median_low(others) * 1e3:.3g} ms elsewhere"
    return slow
