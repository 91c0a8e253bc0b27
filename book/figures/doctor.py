"""What the doctor measured as a page: `python -m book.figures.doctor found.json`, or the traces of a run, one per rank.

The page is next to the first file and needs nothing else. `python -m lib.doctor --json found.json` writes such a file;
`torch.profiler` writes traces (`lib.kineto`), of which the page shows the timeline.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from book.figures.curves import draw_bars
from book.figures.links import draw_links
from book.figures.report import alone
from book.figures.svg import Figure
from book.figures.timeline import draw_timeline
from lib.doctor.traces import page_of
from lib.kineto import Recording, read_traces, waits_s
from lib.trace import Span, Trace


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m book.figures.doctor", description="Draw what lib.doctor measured."
    )
    parser.add_argument("files", metavar="FILE.json", type=Path, nargs="+", help="of lib.doctor, or traces of a run")
    args = parser.parse_args(argv)
    first = args.files[0]
    page = first.with_name(first.name.partition(".")[0] + ".html")
    try:
        found = examination_of(first) if len(args.files) == 1 else None
        html = examined_page(found, first.name) if found else traced_page(read_traces(args.files), first.name)
    except (OSError, ValueError, LookupError, TypeError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    page.write_text(html, encoding="utf-8")
    print(f"open {page}")


def examination_of(path: Path) -> dict | None:
    """What `lib.doctor --json` wrote; None if the file is something else."""
    data = json.loads(path.read_text(encoding="utf-8")) if path.suffix == ".json" else None
    return data if isinstance(data, dict) and "findings" in data else None


def examined_page(found: Mapping, name: str) -> str:
    """A page for a browser, of what `lib.doctor --json` wrote."""
    texts = "".join(f"<li>{escape(one['text'])}</li>" for one in found["findings"])
    calm = "There was nothing to compare." if found.get("exit_code") == 2 else "Nothing looks wrong."
    said = f"<p>What looks wrong:</p><ol>{texts}</ol>" if texts else f"<p>{calm}</p>"
    if unseen := "".join(f"<li>{escape(what)}</li>" for what in found.get("not_judged", ())):
        said += f"<p>Not judged:</p><ul>{unseen}</ul>"
    table = f"<pre>{escape(found['page'])}</pre>" if "page" in found else ""  # what the terminal showed
    return alone(name, said + table + "".join(figure._repr_html_() for figure in figures_of(found)))


def figures_of(found: Mapping) -> Iterator[Figure]:
    """Bandwidth and latency of each link, and the matmuls of each rank, as far as they were measured."""
    if not found.get("transfer"):
        return
    wrong = {rank for one in found["findings"] if one["kind"] == "slow" for rank in one["ranks"]}
    unseen = any("rank speeds" in what for what in found.get("not_judged", ()))
    marked = {}
    for one in found["findings"]:
        if one["kind"] == "link":
            marked |= dict.fromkeys([tuple(one["ranks"]), tuple(one["ranks"][::-1])], one["text"])
    sent = {(one["from"], one["to"]): found["bytes"] / one["seconds"] / 1e6 for one in found["transfer"]}
    slowest = min(sent, key=sent.get)
    alt = f"The slowest link sends {sent[slowest]:,.0f} MB/s, from rank {slowest[0]} to rank {slowest[1]}."
    yield draw_links(sent, unit="MB/s", title="Bandwidth of each link", alt=alt, caption=alt, marked=marked)
    one_way = {pair: one["seconds"] * 1e6 for one in found["latency"] for pair in _both(one["a"], one["b"])}
    alt = f"The longest latency is {max(one_way.values()):,.0f} µs."
    yield draw_links(one_way, unit="µs one way", title="Latency of each link", alt=alt, caption=alt, marked=marked)
    rows = {f"rank {one['rank']}": {"compute": one["seconds"] * 1e3} for one in found["compute"]}
    calm = "Not judged: the machine was busy." if unseen else "No rank is slow."
    alt = f"Slow: rank {', '.join(map(str, sorted(wrong)))}." if wrong else calm
    yield draw_bars(rows, unit="ms", title="The same matmuls on each rank", alt=alt, caption=alt)


def traced_page(trace: Recording, name: str) -> str:
    """A page for a browser, of the traces of a run."""
    return alone(name, f"<pre>{escape(page_of(trace))}</pre>{_timeline_of(trace)._repr_html_()}")


def _timeline_of(trace: Recording) -> Figure:
    """The timeline of a trace of torch.profiler; operators with no gap between them are one bar."""
    waits = waits_s(trace)
    pair = max(waits, key=waits.get, default=None)
    alt = f"Rank {pair[0]} waits {waits[pair] * 1e3:.3g} ms for rank {pair[1]}." if pair else "No rank waits."
    return draw_timeline(in_pixels(trace), title="Computation and communication", alt=alt, caption=alt, unit="ms")


def in_pixels(trace: Trace, pixels: int = 700) -> Trace:
    """The same trace with one span for all that follow each other within a pixel of a timeline so wide."""
    gap_s = max((x.end_s for x in [*trace.events, *trace.spans]), default=0.0) / pixels
    spans: list[Span] = []
    for span in sorted(trace.spans, key=lambda span: (span.rank, span.start_s)):
        last = spans[-1] if spans and spans[-1].rank == span.rank else None
        if last and span.start_s - last.end_s < gap_s:
            spans[-1] = Span(span.rank, span.kind, "", last.start_s, max(last.end_s, span.end_s))
        else:
            spans.append(Span(span.rank, span.kind, "", span.start_s, span.end_s))
    return Trace(list(trace.events), spans)


def _both(a: int, b: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (a, b), (b, a)


if __name__ == "__main__":
    main()
