"""What the doctor found, as one page of text, and as data for a file."""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lib.doctor.expected import Expected
from lib.doctor.measurement import Measurement
from lib.doctor.plausible import compared_with
from lib.doctor.settings import Finding
from lib.doctor.transport import Transport, grouped, transport_text
from lib.runtime.hang import named_ranks
from lib.runtime.words import aligned, counted
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
        not_judged: the parts without a judgement, with the reason.
        began_s: `time.monotonic()` at the start.
        expected: how fast links and GPUs should be, as far as the reader said it.
        transports: rank → the carrier of its messages; empty before that is known.
    """

    members: Sequence[Member | None]
    backend: str
    measured: Measurement | None = None
    findings: list[Finding] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)
    expected: Expected = Expected()
    transports: Mapping[int, Transport] = field(default_factory=dict)
    not_judged: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0: looked, and nothing looks wrong; 1: something does; 2: there was nothing to look at."""
        if self.findings:
            return 1
        compares = self._has_links() or self.measured is not None and self.expected.flops is not None
        return 0 if compares and self._compares_what_is_asked() else 2

    def page(self) -> str:
        """The page, for a terminal."""
        wall_s = time.monotonic() - self.began_s
        lines = [f"{counted(len(self.members), 'rank')}, {self.backend}, examined in {wall_s:.0f} s", ""]
        lines += [*aligned(self._hosts()), ""] if any(self.members) else []
        for transport, ranks in grouped(self.transports).items():
            lines.append(f"{self.backend} on {named_ranks(ranks)}: {transport_text(transport)}")
        lines += [""] if self.transports else []
        if self.measured:
            us = {pair: s * 1e6 for pair, s in self.measured.good("latency").items()}
            us |= {pair[::-1]: n for pair, n in us.items()}
            MBps = {pair: self.measured.size / s / 1e6 for pair, s in self.measured.good("transfer").items()}  # noqa: N806
            if us:
                lines += ["latency one way (µs)", *aligned(self._links(us)), ""]
                lines += ["bandwidth (MB/s)", *aligned(self._links(MBps)), ""]
                lines += [f"all-reduce of {self.measured.size >> 20} MiB (ms)", *aligned(self._axes()), ""]
            if self.measured.ran:
                lines += [self._products_title(), *aligned(self._products()), ""]
        return "\n".join([*lines, *self._verdict()])

    def data(self) -> dict:
        """The same for a file: seconds, bytes, bytes per second."""
        ranks = [member and {"host": member.host, "settings": member.settings} for member in self.members]
        content = {"backend": self.backend, "wall_s": time.monotonic() - self.began_s, "ranks": ranks}
        content["transport"] = [{"rank": rank, **asdict(one)} for rank, one in self.transports.items()]
        content["expected"] = asdict(self.expected)
        if self.measured:
            content |= {"bytes": self.measured.size, "clock_ahead_s": self.measured.ahead_s}
            for kind, names in NAMES.items():
                rows = self.measured.good(kind).items()
                content[kind] = [dict(zip((*names, "seconds"), (*key, s), strict=True)) for key, s in rows]
            content["products"] = [{"rank": rank, **asdict(ran)} for rank, ran in self.measured.ran.items()]
        said = {"looked_at": self._looked_at(), "not_judged": self._not_judged(), "exit_code": self.exit_code}
        return content | said | {"findings": [one._asdict() for one in self.findings]}

    def model_s(self, ranks: Sequence[int]) -> float:
        """Seconds of an all-reduce by `lib.cost`, if all links of the ring were as its slowest link."""
        return self.measured.model_s(ranks)

    def _has_links(self) -> bool:
        return self.measured is not None and len(self.members) > 1

    def _compares_what_is_asked(self) -> bool:
        """Whether something was compared with the figures of the reader, if there are any."""
        several = len({member.machine for member in self.members if member}) > 1
        asks_between = self.expected.between_Bps is not None and not self.expected.gpu_said
        return several or not asks_between

    def _looked_at(self) -> list[str]:
        """What was compared, in words."""
        came = [rank for rank, member in enumerate(self.members) if member]
        words = [f"the settings of {counted(len(came), 'rank')}"] if came else []
        if self.measured:
            links = self.measured.of("transfer")
            axes = dict.fromkeys(axis for axis, _ in self.measured.of("all_reduce"))
            words += (
                [f"{counted(len(links), 'link')}, {counted(len(self.measured.ahead_s), 'clock')}"] if links else []
            )
            words += [f"all-reduces along {', '.join(axes)}"] if axes else []
            words += [f"products on {counted(len(self.measured.ran), 'rank')}"] if self.measured.ran else []
        return words

    def _not_judged(self) -> list[str]:
        """What was not, with the reason."""
        if not self.measured:
            return ["links, processors and collectives: the examination ended before they were measured"]
        if len(self.members) == 1:
            return [*self.not_judged, "links, collectives, and its speed beside other ranks: it is the only rank"]
        return self.not_judged

    def _verdict(self) -> list[str]:
        """The last lines: the parts that were examined, those that were not, and the findings."""
        lines = [f"looked at: {'; '.join(self._looked_at()) or 'nothing'}"]
        if self._has_links():
            lines.append(compared_with(self.expected, [member for member in self.members if member]))
        lines += [f"not judged: {part}" for part in self._not_judged()]
        if self.exit_code == 2:
            figures = "the figures of --expect" if self._has_links() else "anything"
            return [*lines, f"could not compare {figures}: this is no verdict on the cluster"]
        if self._not_judged() and not self.findings:
            return [*lines, "nothing looks wrong in what was judged"]
        return lines + found_text(self.findings)

    def _products_title(self) -> str:
        ran = [*self.measured.ran.values()]
        how = "all ranks at the same time" if ran[0].on_gpu else "in turns, half of the cores at a time"
        return f"products for {ran[0].wall_s:.1f} s, {how}"

    def _products(self) -> Iterator[tuple]:
        """A row for each rank: its speed, and the parts of its time; the slowest, if there are many."""
        yield "rank", "GFLOP/s", "ran", "waited for a processor", "stood still"
        slowest = sorted(self.measured.ran.items(), key=lambda item: item[1].flops)[:MOST_ROWS]
        for rank, ran in sorted(slowest):
            seconds = (ran.cpu_s, ran.waited_s, ran.stood_s)
            unseen = ran.on_gpu or ran.waited_s is None
            yield str(rank), f"{ran.flops / 1e9:,.0f}", *("?" if unseen else f"{s / ran.wall_s:.0%}" for s in seconds)

    def _hosts(self) -> Iterator[tuple]:
        """A row for each host: its ranks, and the settings of the first."""
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
    page = report.page()
    print(page, flush=True)
    if path:
        try:
            Path(path).write_text(json.dumps(report.data() | {"page": page}, indent=1), encoding="utf-8")
        except OSError as error:
            print(f"--json {path} could not be written: {error.strerror}", file=sys.stderr)


def found_text(findings: Sequence[Finding]) -> list[str]:
    """The lines that say what looks wrong."""
    lines = [f"  {i}. {finding.text}" for i, finding in enumerate(findings, 1)]
    return ["looks wrong:", *lines] if lines else ["nothing looks wrong"]
