"""What the doctor found, as one page of text, and as data for a file."""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lib import cost
from lib.doctor.links import Measurement
from lib.doctor.settings import Finding
from lib.torchrun.meeting import Member

MOST_ROWS = 16  # of a table, and columns
NAMES = {"latency": "ab", "transfer": ("from", "to"), "compute": ["rank"], "all_reduce": ("axis", "ranks")}


@dataclass
class Examination:
    """What is known so far: it is printed also if the rest hangs.

    Args:
        members: who came, in rank order; None for a rank that did not.
        backend: `gloo` or `nccl`.
        measured: None before it is.
        began_s: `time.monotonic()` at the start.
    """

    members: Sequence[Member | None]
    backend: str
    measured: Measurement | None = None
    findings: list[Finding] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)

    def page(self) -> str:
        """The page, for a terminal."""
        wall_s = time.monotonic() - self.began_s
        lines = [f"{len(self.members)} ranks, {self.backend}, examined in {wall_s:.0f} s", ""]
        lines += [*aligned(self._hosts()), ""] if any(self.members) else []
        if self.measured:
            us = {pair: s * 1e6 for pair, s in self.measured.good("latency").items()}
            us |= {pair[::-1]: n for pair, n in us.items()}
            MBps = {pair: self.measured.size / s / 1e6 for pair, s in self.measured.good("transfer").items()}  # noqa: N806
            lines += ["latency one way (µs)", *aligned(self._links(us)), ""]
            lines += ["bandwidth (MB/s)", *aligned(self._links(MBps)), ""]
            lines += [f"all-reduce of {self.measured.size >> 20} MiB (ms)", *aligned(self._axes()), ""]
        return "\n".join([*lines, *found_text(self.findings)])

    def data(self) -> dict:
        """The same for a file: seconds, bytes, bytes per second."""
        ranks = [member and {"host": member.host, "settings": member.settings} for member in self.members]
        content = {"backend": self.backend, "wall_s": time.monotonic() - self.began_s, "ranks": ranks}
        if self.measured:
            content |= {"bytes": self.measured.size, "clock_ahead_s": self.measured.ahead_s}
            for kind, names in NAMES.items():
                rows = self.measured.good(kind).items()
                content[kind] = [dict(zip((*names, "seconds"), (*key, s), strict=True)) for key, s in rows]
        return content | {"findings": [finding._asdict() for finding in self.findings]}

    def model_s(self, ranks: Sequence[int]) -> float:
        """Seconds of an all-reduce by `lib.cost`, if all links of the ring were as its slowest link."""
        links = (self.measured.good(kind).items() for kind in ("latency", "transfer"))
        alpha_s, large_s = (max(s for pair, s in some if {*pair} <= {*ranks}) for some in links)
        return cost.comm_s("all_reduce", self.measured.size, len(ranks), alpha_s, self.measured.size / large_s)

    def _hosts(self) -> Iterator[tuple]:
        """A row for each host: its ranks, and what the first of them says."""
        yield "host", "ranks", *(names := ("device", "cores", "threads", "torch")), "clock"
        for host in [*dict.fromkeys(member.host for member in self.members if member)][:MOST_ROWS]:
            its = [rank for rank, member in enumerate(self.members) if member and member.host == host]
            clock = f"{self.measured.ahead_s.get(its[0], 0.0) * 1e3:+.1f} ms" if self.measured else "?"
            yield host, ", ".join(map(str, its)), *(self.members[its[0]].settings[name] for name in names), clock

    def _links(self, numbers: Mapping[tuple, float]) -> Iterator[tuple]:
        """A row for each rank that sends, a column for each that receives."""
        ranks = range(min(len(self.members), MOST_ROWS))
        yield "from \\ to", *map(str, ranks)
        for a in ranks:
            yield str(a), *(f"{numbers[a, b]:.0f}" if (a, b) in numbers else "·" for b in ranks)

    def _axes(self) -> Iterator[tuple]:
        """A row for each axis: the slowest of its groups, beside the model."""
        yield "axis", "slowest", "by formula", "ranks"
        seconds = self.measured.good("all_reduce")
        for axis in dict.fromkeys(axis for axis, _ in seconds):
            s, ranks = max((s, ranks) for (its_axis, ranks), s in seconds.items() if its_axis == axis)
            yield axis, f"{s * 1e3:.2f}", f"{self.model_s(ranks) * 1e3:.2f}", ", ".join(map(str, ranks))


def tell(report: Examination, path: str | None) -> None:
    """Print the page, and write the data to a file."""
    print(report.page(), flush=True)
    if path:
        try:
            Path(path).write_text(json.dumps(report.data(), indent=1), encoding="utf-8")
        except OSError as error:
            print(f"--json {path} could not be written: {error.strerror}", file=sys.stderr)


def found_text(findings: Sequence[Finding]) -> list[str]:
    """The lines that say what looks wrong."""
    lines = [f"  {i}. {finding.text}" for i, finding in enumerate(findings, 1)]
    return ["looks wrong:", *lines] if lines else ["nothing looks wrong"]


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines with columns as wide as their widest cell."""
    columns = [[cell.rjust(max(map(len, column))) for cell in column] for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(row) for row in zip(*columns, strict=True)]
