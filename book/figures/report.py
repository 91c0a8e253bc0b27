"""A training run as a page: `python -m book.figures.report run.json` draws the data of `lib.train --report run.json`.

The page, run.html, is next to the file and needs nothing else: no kernel, no network, no folder of pictures. One can
copy it off a cluster, open it and send it. The run itself does not draw: a machine that trains does not need the
libraries that draw.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace

from book.figures.curves import draw_bars, draw_curves
from book.figures.memory import UNITS, draw_memory
from book.figures.svg import FONT, PAPER, Figure, variables

MOST_POINTS, MOST_RANKS = 400, 16  # of a curve, and bars of a figure
KINDS = {"parameter": "parameter", "gradient": "gradient", "optimizer": "optimizer state", "activation": "activation"}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m book.figures.report",
        description="Draw the measurements of `python -m lib.train --report FILE.json`.",
    )
    parser.add_argument("report", metavar="FILE.json", type=Path)
    args = parser.parse_args(argv)
    try:
        ranks = json.loads(args.report.read_text(encoding="utf-8"))["ranks"]
        steps = len(ranks[0]["losses"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        parser.exit(2, f"{parser.prog}: {args.report} is no report of lib.train: {error}\n")
    page = args.report.with_suffix(".html")
    if page == args.report:
        parser.exit(2, f"{parser.prog}: {page} is where the page goes; call the report {page.with_suffix('.json')}\n")
    page.write_text(report_page(ranks, args.report.name), encoding="utf-8")
    print(f"{steps:,} steps on {len(ranks)} rank{'s' * (len(ranks) > 1)}: open {page}")


def report_page(ranks: Sequence[Mapping], name: str) -> str:
    """A page for a browser.

    Args:
        ranks: the report of `lib.training.loop.train` for each rank, as JSON keeps it.
        name: of the run.
    """
    settings = escape(json.dumps(ranks[0]["config"], indent=2))
    drawn = "".join(figure._repr_html_() for figure in figures(ranks))
    folded = f"<details><summary>All settings</summary><pre>{settings}</pre></details>"
    return alone(name, f"<p>{escape(summary(ranks))}</p>{drawn}{folded}")


def alone(name: str, body: str) -> str:
    """A page with this title that needs no other file."""
    light, dark = (
        "".join(f"{key}:{value};" for key, value in variables(mode).items()) + f"background:{PAPER[mode]}"
        for mode in ("light", "dark")
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(name)}</title><style>:root{{color-scheme:light dark;{light}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
        f"body{{max-width:760px;margin:2em auto;padding:0 16px;color:var(--pbh-text);font:16px/1.5 {FONT}}}"
        "pre{overflow-x:auto;font-size:13px}</style>"
        f"<h1>{escape(name)}</h1>{body}</html>"
    )


def summary(ranks: Sequence[Mapping]) -> str:
    """The run in a few sentences."""
    first, config = ranks[0], ranks[0]["config"]
    losses, layout = first["losses"], config["layout"]
    axes = ", ".join(f"{axis} {layout[axis]}" for axis in ("dp", "pp", "tp") if layout[axis] > 1)
    text = f"{len(losses):,} steps of {config['global_batch']} sequences of {config['model']['context']} tokens, on "
    text += f"{len(ranks)} ranks ({axes}). " if axes else "one process. "
    text += f"The loss went from {losses[0]:.3f} to {losses[-1]:.3f} nats per token."
    if first["validation"]:
        text += f" On text that was not trained on it is {first['validation'][-1][1]:.3f}."
    if number := first.get("stopped_by"):
        text += f" The run was stopped by {signal.Signals(number).name}."
    return text


def figures(ranks: Sequence[Mapping]) -> Iterator[Figure]:
    """Loss, speed, memory and traffic, as far as this run measured them."""
    yield _loss(ranks[0])
    if ranks[0]["step_s"]:  # not if all steps were done before
        yield _speed(ranks)
    if ranks[0]["memory"]:
        yield _memory_of_a_step(ranks[0])
    if ranks[0]["peak_bytes"]:
        yield _peaks(ranks)
    if any(rank["traffic"] for rank in ranks):
        yield _traffic(ranks)


def _loss(report: Mapping) -> Figure:
    losses, validation = report["losses"], report["validation"]
    series: dict[str, Sequence] = {"validation": tuple(zip(*validation, strict=True))} if validation else {}
    series["training"] = _thinned(losses)
    said = f"The training loss goes from {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps."
    caption = "The mean over all ranks, before the step." + _spans(losses, "steps, their mean")
    return draw_curves(series, x="step", y="loss (nats per token)", title="Loss", alt=said, caption=caption)


def _speed(ranks: Sequence[Mapping]) -> Figure:
    config = ranks[0]["config"]
    tokens = config["global_batch"] * config["model"]["context"]
    slowest = [max(times) for times in zip(*(rank["step_s"] for rank in ranks), strict=True)]
    first = len(ranks[0]["losses"]) - len(slowest)
    trend, each = (_thinned(slowest, first, most) for most in (20, MOST_POINTS))
    said = f"{tokens / median(slowest):,.0f} tokens per second in the median step, by the slowest rank."
    caption = f"{said} The second step is slow because its memory is watched."
    caption += _spans(slowest, "steps, their mean")
    curves = {name: (xs, [tokens / s for s in times]) for name, (xs, times) in (("trend", trend), ("step", each))}
    return draw_curves(curves, x="step", y="tokens per second", title="Speed", alt=said, caption=caption)


def _memory_of_a_step(report: Mapping) -> Figure:
    most = max(usage["total"] for _, usage in report["memory"])
    unit = _unit(most)
    said = f"Rank 0 holds at most {most / UNITS[unit]:.3g} {unit} of tensors in this step."
    seen = SimpleNamespace(timeline=_highest(report["memory"]), phases=[])
    caption = said + _spans(report["memory"], "changes of memory, the highest")
    return draw_memory(seen, title="Memory of rank 0 in one step", alt=said, caption=caption, unit=unit)


def _peaks(ranks: Sequence[Mapping]) -> Figure:
    peaks = {f"rank {i}": rank["peak_bytes"] for i, rank in enumerate(ranks)}
    fullest = sorted(peaks, key=lambda name: -peaks[name]["total"])[:MOST_RANKS]
    unit = _unit(peaks[fullest[0]]["total"])
    shown = ((name, peak) for name, peak in peaks.items() if name in fullest)
    rows = {name: {KINDS[kind]: peak[kind] / UNITS[unit] for kind in KINDS} for name, peak in shown}
    said = f"{fullest[0].capitalize()} held most: {peaks[fullest[0]]['total'] / UNITS[unit]:.3g} {unit} at a time."
    more = f" Shown are the {MOST_RANKS} fullest of {len(ranks)} ranks." * (len(ranks) > MOST_RANKS)
    caption = f"{said} A bar adds up the highest of each kind, which need not be at the same time.{more}"
    return draw_bars(rows, unit=unit, form="{:.3g}", title="Peak memory of each rank", alt=said, caption=caption)


def _traffic(ranks: Sequence[Mapping]) -> Figure:
    sent = [{kind: n_bytes for kind, (_, n_bytes) in rank["traffic"].items()} for rank in ranks]
    busiest = max(range(len(ranks)), key=lambda rank: sum(sent[rank].values()))
    steps = len(ranks[0]["step_s"])
    unit = _unit(max(sent[busiest].values()) / steps)
    said = f"Rank {busiest} sent most: {sum(sent[busiest].values()) / steps / UNITS[unit]:.3g} {unit} per step."
    rows = {kind: {"comm": n_bytes / steps / UNITS[unit]} for kind, n_bytes in sent[busiest].items()}
    title = f"Sent by rank {busiest} per step"
    return draw_bars(rows, unit=unit, form="{:.3g}", title=title, alt=said, caption=said)


def _unit(n_bytes: float) -> str:
    return next((unit for unit in ("GB", "MB") if n_bytes >= UNITS[unit]), "kB")


def _thinned(values: Sequence[float], first: int = 0, most: int = MOST_POINTS) -> tuple[list[float], list[float]]:
    """Steps from `first` on and their values; of a long run, means over so many that a curve can be drawn of them."""
    size = _size_of_spans(values, most)
    spans = [values[i : i + size] for i in range(0, len(values), size)]
    return [first + i * size + (len(span) - 1) / 2 for i, span in enumerate(spans)], [mean(span) for span in spans]


def _highest(samples: Sequence) -> list:
    """Of many samples of memory the highest of each span, so that no peak is lost."""
    size = _size_of_spans(samples)
    return [max(samples[i : i + size], key=lambda sample: sample[1]["total"]) for i in range(0, len(samples), size)]


def _size_of_spans(values: Sequence, most: int = MOST_POINTS) -> int:
    return math.ceil(len(values) / most)


def _spans(values: Sequence, of_what: str) -> str:
    """A sentence for the caption if a point is several values."""
    size = _size_of_spans(values)
    return f" A point stands for {size} {of_what}." if size > 1 else ""


if __name__ == "__main__":
    main()
