"""What the planner found, for a terminal and as JSON: a report, layouts of a search, predictions of published runs."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from lib.planner.report import WIDTH, Report
from lib.planner.rows import Prediction, distinct, medians
from lib.planner.search import Planned, layout_text, why_slower

MOST_PLACES = 16  # of a pipeline that are listed


def report_text(report: Report) -> str:
    """A report, about 100 characters wide."""
    assumes = ["assumes"] * bool(report.assumes) + [f"{name}: {said}" for name, said in report.assumes.items()]
    parts = report.axes, _held(report), [_sent(report)], report.waits, _answers(report), assumes
    return "\n\n".join("\n".join(map(_wrapped, part)) for part in parts if part)


def _held(report: Report) -> list[str]:
    """A row for each place in the pipeline; and why the highest peak is higher than the lowest."""
    unit, scale, form = ("GB", 1e9, ".2f") if report.peak_bytes >= 1e9 else ("MB", 1e6, ".3f")
    kinds = [kind for kind in report.places[0]["held"] if any(place["held"][kind] for place in report.places)]
    rows = [["ranks", "layers", "Ψ", "m kept", *kinds[:-1], f"total {unit}"]]
    for place in report.places:
        sizes = [format(place["held"][kind] / scale, form) for kind in kinds]
        psi = f"{place['parameters'] / 1e9:.3f}e9" if unit == "GB" else f"{place['parameters']:,}"
        rows.append([place["ranks"], place["layers"], psi, f"{place['in_flight']:.3g}", *sizes])
    if len(report.places) > MOST_PLACES:
        rows[MOST_PLACES // 2 : -MOST_PLACES // 2] = [["…", *[""] * (len(rows[0]) - 1)]]
    lines = [table(rows), *report.notes]
    most, least = (of(report.places, key=lambda place: place["held"]["total"]) for of in (max, min))
    more = {kind: (most["held"][kind] - least["held"][kind]) / scale for kind in kinds if kind != "total"}
    why = max(more, key=more.get)
    if more[why] > 0:
        flights = f", {most['in_flight']:.3g} microbatches in flight instead of {least['in_flight']:.3g}"
        than = f"than on ranks {least['ranks']}{flights if why == 'activations' else ''}"
        lines.insert(1, f"highest on ranks {most['ranks']}: {more[why]:{form}} {unit} more {why} {than}")
    return lines


def _sent(report: Report) -> str:
    """A row for each kind of message; a range goes from the place that sends least to the place that sends most."""
    if not report.sends:
        return "nothing is sent"
    unit, scale, form = ("MB", 1e6, ".3f") if report.sends[0]["calls"] else ("GB", 1e9, ".2f")
    rows = [["sent by a rank in a step", *(["calls"] if unit == "MB" else []), unit, "nodes"]]
    for sent in report.sends:
        calls = [_range(sent["calls"], "d")] if sent["calls"] else []
        rows.append([sent["what"], *calls, _range([n / scale for n in sent["bytes"]], form), sent["where"]])
    return table(rows)


def _range(numbers: Sequence[float], form: str) -> str:
    least, most = (format(number, form) for number in numbers)
    return most if least == most else f"{least} to {most}"


def _answers(report: Report) -> list[str]:
    """Seconds by kind; tokens per second; utilisation, with the attention that it counts; days and money."""
    of, kinds = report.answers, {kind: s for kind, s in report.seconds.items() if s}
    if not of:
        return []
    shares = ", ".join(f"{kind} {s:.2f} ({s / of['step_s']:.0%})" for kind, s in kinds.items())
    lines = [f"{of['step_s']:.2f} s per step: {shares}"]
    lines.append(f"{of['tokens_per_s']:,.0f} tokens/s, {of['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU")
    used = "MFU {:.1%}, HFU {:.1%}, counting "
    lines.append(used.format(of["mfu"], of["hfu"]) + "the full s x s matrix of attention")
    if of["mfu"] > 1.1 * of["mfu_causal"]:
        lines.append(
            used.format(of["mfu_causal"], of["hfu_causal"]) + "its causal half, all that a fused kernel computes"
        )
    if "days" in of:
        tokens = f"{of['tokens'] / 1e9:,.6g} billion tokens"
        lines.append(f"{tokens}: {of['days']:,.1f} days, {of['gpu_hours']:,.0f} GPU hours")
    if "money" in of:
        lines[-1] += f", {of['money']:,.0f} at {of['price_per_gpu_hour']:g} per GPU hour"
    return lines


def _wrapped(line: str) -> str:
    """A line of text in lines of at most `WIDTH`; a table stays as it is."""
    if "\n" in line or len(line) <= WIDTH:
        return line
    return textwrap.fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def others_text(found: list[Planned], mine: Planned | None, nothing: str = "") -> str:
    """The fastest layouts of a search, a line each, and the reason for the distance; to `mine` too, if it is given.

    Args:
        nothing: why there is none.
    """
    lines = ["the fastest layouts that fit:" if found else nothing]
    for place, one in enumerate(found, 1):
        said = f"{layout_text(one.layout)}, {one.memory.total / 1e9:.1f} GB, {one.seconds.total:.2f} s"
        lines.append(f"{place}. {said}" + (f": {why_slower(found[0], one)}" if place > 1 else ""))
    if mine and found:
        slower = mine.seconds.total > found[0].seconds.total
        lines.append(f"yours is {why_slower(found[0], mine) if slower else 'as fast as the fastest that was found'}")
    return "\n".join(map(_wrapped, lines))


def rows_text(predictions: list[Prediction]) -> str:
    """Measured and predicted seconds, a line for each run, and the medians of each group."""
    plain = rows_json(predictions)
    rows = [["run", "measured s", "predicted s", "error", "TFLOP/s", "constants", "mostly"]]
    for one in plain["runs"]:
        kind = max(one["kinds"], key=one["kinds"].get)
        mostly = f"{one['kinds'][kind] / one['seconds']:.0%} {kind}"
        times = f"{one['measured_s']:.3f}", f"{one['seconds']:.3f}", f"{one['error']:+.1%}", f"{one['tflops']:.0f}"
        mostly += f"; {one['without']} is not modelled" if one["without"] else ""
        rows.append([one["id"], *times, one["evidence"], mostly])
    tables = [table(rows)]
    for kind, name in (("medians", "group"), ("stacks", "stack, GPU"), ("evidence", "constants")):
        lines = [[name, "runs", "configurations", "median", "worst"]]
        for key, of in plain[kind].items():
            sizes = str(of["runs"]), str(of["configurations"])
            lines.append([key, *sizes, f"{of['median']:.1%}", f"{of['worst']:.1%}"])
        tables.append(table(lines))
    return "\n\n".join(tables)


def rows_json(predictions: list[Prediction]) -> dict:
    """The same as plain data; an error of 0.05 is 5 % too many seconds."""
    kinds = {"medians": "group", "stacks": "stack", "evidence": "evidence"}
    return {
        "runs": [
            {"id": one.id, "group": one.group, "seconds": one.seconds.total, "measured_s": one.measured_s}
            | {"tflops": one.tflops, "error": one.error, "kinds": one.seconds._asdict()}
            | {"evidence": one.evidence, "without": one.without}
            for one in predictions
        ],
    } | {kind: _by(predictions, field) for kind, field in kinds.items()}


def _by(predictions: list[Prediction], field: str) -> dict[str, dict[str, float]]:
    """For each value of a field the runs, their configurations, and the median and worst error of those."""
    runs = medians((getattr(one, field), 0.0) for one in predictions)
    found = medians((getattr(one, field), one.error) for one in distinct(predictions))
    names = "configurations", "median", "worst"
    return {key: {"runs": runs[key][0]} | dict(zip(names, of, strict=True)) for key, of in found.items()}


def table(rows: list[list[str]]) -> str:
    """Rows as columns side by side; words to the left, numbers to the right."""
    columns = []
    for i, column in enumerate(zip(*rows, strict=True)):
        place = str.ljust if i == 0 or not column[-1][:1].isdigit() else str.rjust
        columns.append([place(cell, max(map(len, column))) for cell in column])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))
