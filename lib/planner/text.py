"""What the planner found, for a terminal and as JSON: a plan, layouts of a cluster, predictions of published runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby

from lib.pipeline.gantt import gantt
from lib.planner.peak import not_counted, step_memory
from lib.planner.plan import Plan, step_bubble
from lib.planner.rows import Prediction, distinct, medians
from lib.planner.search import Planned, why_slower
from lib.planner.traffic import bytes_out_of_a_node, step_traffic
from lib.planner.training import Layout4D, Training

WIDTH, MOST_GANTT_ROWS = 100, 8
KINDS = {"parameter": "parameters", "gradient": "gradients", "optimizer": "optimizer", "activation": "activations"}
KINDS |= {"total": "total"}  # kind of bytes → its word


def plan_text(plan: Plan, ranks_per_node: int) -> str:
    """The full plan, at most 100 characters wide."""
    shares = "\n".join([table(_shares(plan)), *map("not exact: {}".format, not_counted(plan))])
    return "\n\n".join([_holds(plan), shares, table(_sends(plan, ranks_per_node)), _waits(plan)]).rstrip()


def _holds(plan: Plan) -> str:
    """The layout in words: the dimension that each axis splits."""
    layout, model = plan.layout, plan.model
    order = " x ".join(f"{axis} {n}" for axis, n in layout.sizes.items())
    rows, tokens = plan.global_batch // layout.dp, model.context
    between = tokens // layout.tp if layout.sequence_parallel else tokens
    return f"""\
{layout.num_ranks} ranks = {order} (neighbours on the last axis have consecutive numbers)
dp {layout.dp}: {rows} of {plan.global_batch} sequences each, in {layout.microbatches} microbatches of {plan.rows}; \
zero {layout.zero}
pp {layout.pp}: {layout.num_stages} stages, schedule {plan.schedule.name}
tp {layout.tp}: {model.num_heads // layout.tp} of {model.num_heads} heads, \
{model.vocab_size // layout.tp} of {model.vocab_size} vocabulary entries, \
{between} of {tokens} tokens between the layers"""


def _shares(plan: Plan) -> list[list[str]]:
    """A row for each place in the pipeline: its ranks, layers and memory."""
    rows = [["ranks", "layers", "Ψ", *KINDS.values(), "MB"]]
    for place in range(plan.layout.pp):
        held, ranks = step_memory(plan, place), [r for r in range(plan.layout.num_ranks) if plan.place(r) == place]
        layers = " + ".join(_layers(plan, stage) for stage in plan.stages(place))
        sizes = [f"{held[kind] / 1e6:.3f}" for kind in KINDS]
        rows.append([ranks_text(ranks), layers, f"{plan.num_parameters(place):,}", *sizes, ""])
    return rows


def _layers(plan: Plan, stage: int) -> str:
    blocks = [layer for layer in plan.layers[stage] if layer < plan.model.num_layers]
    parts = ["embed"] if stage == 0 else []
    parts += [ranks_text(blocks)] if blocks else []
    return " ".join(parts + (["head"] if plan.model.num_layers in plan.layers[stage] else []))


def ranks_text(ranks: Sequence[int]) -> str:
    """`0-3, 8-11`; of more than two runs the first, and how many ranks in all."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])]
    words = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return ", ".join(words) if len(words) <= 2 else f"{words[0]}, … ({len(ranks)})"


def _sends(plan: Plan, ranks_per_node: int) -> list[list[str]]:
    """A row for each kind on each axis; a range goes from the place that sends least to the place that sends most."""
    of_places = [step_traffic(plan, place) for place in range(plan.layout.pp)]
    rows = [["sent by a rank in a step", "calls", "MB", "nodes"]]
    for (kind, axis), leaves in bytes_out_of_a_node(plan, ranks_per_node).items():
        calls, sent = zip(*(traffic.get((kind, axis), (0, 0.0)) for traffic in of_places), strict=True)
        where = f"out of a node: {leaves / 1e6:.3f} MB" if leaves else "inside a node"
        rows.append([f"{kind} {axis}", _range(calls, "d"), _range([n / 1e6 for n in sent], ".3f"), where])
    return rows if len(rows) > 1 else [["nothing is sent"]]


def _range(numbers: Sequence[float], form: str) -> str:
    least, most = (format(number, form) for number in (min(numbers), max(numbers)))
    return most if least == most else f"{least} to {most}"


def _waits(plan: Plan) -> str:
    """The bubble, and the pipeline in letters where it fits."""
    if plan.layout.pp == 1:
        return ""
    bubble, equal = step_bubble(plan)
    lines = [f"bubble: {bubble:.1%} of all ranks' time (were all stages equal, {equal:.1%})"]
    picture = gantt(plan.timeline).splitlines()
    fits = len(picture) <= MOST_GANTT_ROWS and max(map(len, picture)) <= WIDTH
    return "\n".join(lines + (picture if fits else [f"(its {len(picture)} rows are too large to be drawn here)"]))


def layouts_text(training: Training, found: list[Planned]) -> str:
    """The layouts, a column each: memory and seconds by kind, utilisation, and why the next layout is slower."""
    plain = layouts_json(training, found)["layouts"]
    rows = [["", *(f"{place}." for place, _ in enumerate(found, 1))]]
    rows += [[name, *(str(one["layout"][name]) for one in plain)] for name in Layout4D._fields]
    for part, unit, scale, last, form in (
        ("memory_bytes", "GB: ", 1e9, "GB in all", ".1f"),
        ("seconds", "s: ", 1, "s per step", ".2f"),
    ):
        of_kinds = {kind: [one[part][kind] / scale for one in plain] for kind in plain[0][part]}
        total = of_kinds.pop("total")
        rows += [[unit + kind, *(f"{n:.2f}" for n in each)] for kind, each in of_kinds.items() if any(each)]
        rows.append([last, *(format(n, form) for n in total)])
    rows += [[name.upper(), *(f"{one[name]:.1%}" for one in plain)] for name in ("mfu", "hfu")]
    reasons = [f"{place}. is {why_slower(found[0], one)}" for place, one in enumerate(found[1:], 2)]
    return "\n".join([table(rows), *reasons])


def layouts_json(training: Training, found: list[Planned]) -> dict:
    """The same as plain data."""
    layouts = [
        {
            "layout": one.layout._asdict(),
            "seconds": one.seconds._asdict() | {"total": one.seconds.total},
            "memory_bytes": one.memory._asdict() | {"total": one.memory.total},
            "mfu": training.utilisation(one.seconds.total),
            "hfu": training.utilisation(one.seconds.total, one.layout.recompute, one.layout.every),
        }
        for one in found
    ]
    sizes = {"model": asdict(training.model), "gpus": training.cluster.gpus, "global_batch": training.global_batch}
    return sizes | {"layouts": layouts}


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
