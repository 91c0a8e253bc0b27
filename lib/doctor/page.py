"""What the doctor found, as one page of text, and as data for a file."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import quantiles

from lib import cost
from lib.doctor.links import Measurement
from lib.doctor.settings import Finding
from lib.torchrun.meeting import Member

MOST_ROWS = 16  # of a table, and columns
NAMES = {
    "latency": "ab",
    "transfer": ("from", "to"),
    "compute": ["rank"],
    "all_reduce": ("axis", "ranks"),
}  # in a file


@dataclass
class Report:
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
        came = [one for one in self.members if one]
        lines = [
            f"{len(self.members)} ranks, {self.backend}, examined in {time.monotonic() - self.began_s:.0f} s",
            "",
        ]
        lines += [*_table(self._hosts()), ""] if came else []
        if self.measured:
            for title, cells in (("latency one way (µs)", self._latency_us()), ("bandwidth (MB/s)", self._MBps())):
                ranks = range(min(len(self.members), MOST_ROWS))
                rows = [(str(a), *(cells.get((a, b), "·") for b in ranks)) for a in ranks]
                lines += [title, *_table([("from \\ to", *map(str, ranks)), *rows]), ""]
            lines += [*_table(self._axes()), ""]
        lines += ["looks wrong:" if self.findings else "nothing looks wrong"]
        return "\n".join(lines + [f"  {i}. {one.text}" for i, one in enumerate(self.findings, 1)])

    def data(self) -> dict:
        """The same for a file: seconds, bytes, bytes per second."""
        ranks = [one and {"host": one.host, "settings": one.settings} for one in self.members]
        found = {"backend": self.backend, "wall_s": time.monotonic() - self.began_s, "ranks": ranks}
        if self.measured:
            found |= {"bytes": self.measured.size, "clock_ahead_s": self.measured.ahead_s}
            for kind, names in NAMES.items():
                rows = good(self.measured.of(kind)).items()
                found[kind] = [dict(zip((*names, "seconds"), (*key, s), strict=True)) for key, s in rows]
        return found | {"findings": [one._asdict() for one in self.findings]}

    def model_s(self, ranks: Sequence[int]) -> float:
        """Seconds of an all-reduce by `lib.cost`, if all links of the ring were as its slowest link."""
        alpha_s, large_s = (
            max(s for pair, s in good(self.measured.of(kind)).items() if {*pair} <= {*ranks})
            for kind in ("latency", "transfer")
        )
        return cost.comm_s("all_reduce", self.measured.size, len(ranks), alpha_s, self.measured.size / large_s)

    def _hosts(self) -> Iterator[tuple]:
        """A row for each host: its ranks, and what the first of them says."""
        yield "host", "ranks", *(names := ("device", "cores", "threads", "torch")), "clock"
        for host in [*dict.fromkeys(one.host for one in self.members if one)][:MOST_ROWS]:
            its = [rank for rank, one in enumerate(self.members) if one and one.host == host]
            clock = f"{self.measured.ahead_s.get(its[0], 0.0) * 1e3:+.1f} ms" if self.measured else "?"
            yield host, ", ".join(map(str, its)), *(self.members[its[0]].settings[name] for name in names), clock

    def _latency_us(self) -> dict[tuple, str]:
        seconds = good(self.measured.of("latency"))
        return {pair: f"{s * 1e6:.0f}" for (a, b), s in seconds.items() for pair in ((a, b), (b, a))}

    def _MBps(self) -> dict[tuple, str]:  # noqa: N802 a unit
        return {pair: f"{self.measured.size / s / 1e6:.0f}" for pair, s in good(self.measured.of("transfer")).items()}

    def _axes(self) -> Iterator[tuple]:
        """A row for each axis: the slowest of its groups, beside the model."""
        yield "axis", f"all-reduce of {self.measured.size >> 20} MiB", "a ring of its slowest link", "ranks"
        seconds = good(self.measured.of("all_reduce"))
        for axis in dict.fromkeys(axis for axis, _ in seconds):
            s, ranks = max((s, ranks) for (one, ranks), s in seconds.items() if one == axis)
            yield axis, f"{s * 1e3:.2f} ms", f"{self.model_s(ranks) * 1e3:.2f} ms", ", ".join(map(str, ranks))


def tell(report: Report, path: str | None) -> None:
    """Print the page, and write the data to a file."""
    print(report.page(), flush=True)
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(report.data(), file, indent=1)


def good(seconds: dict[tuple, list[float]]) -> dict[tuple, float]:
    """The lower quartile of the rounds of each: what a round takes that nothing disturbs."""
    return {key: quantiles(values, n=4)[0] for key, values in seconds.items()}


def _table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines with columns as wide as their widest cell."""
    columns = [[cell.rjust(max(map(len, column))) for cell in column] for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(row) for row in zip(*columns, strict=True)]
