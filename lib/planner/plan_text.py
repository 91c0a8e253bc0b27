"""A plan as text, for a terminal: the layout, and the memory, messages and waits of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from lib.pipeline.gantt import gantt
from lib.planner.links import bytes_out_of_a_node
from lib.planner.peak import not_counted, step_memory
from lib.planner.plan import Plan, step_bubble
from lib.planner.traffic import step_traffic

WIDTH, MOST_GANTT_ROWS = 100, 8
KINDS = {  # kind of bytes → its word; `lib.planner` uses the same words
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer": "optimizer",
    "activation": "activations",
    "total": "total",
}


def plan_text(plan: Plan, ranks_per_node: int) -> str:
    """The full plan, at most 100 characters wide."""
    return "\n\n".join(
        [
            _holds(plan),
            "\n".join([table(_shares(plan)), *map("not exact: {}".format, not_counted(plan))]),
            table(_sends(plan, ranks_per_node)),
            _waits(plan),
        ]
    ).rstrip()


def _holds(plan: Plan) -> str:
    """The layout in words: the dimension that each axis splits."""
    layout, model = plan.layout, plan.model
    order = " x ".join(f"{axis} {n}" for axis, n in layout.sizes.items())
    rows, tokens = plan.global_batch // layout.dp, model.context
    between = tokens // layout.tp if layout.sequence_parallel else tokens
    return "\n".join(
        [
            f"{layout.num_ranks} ranks = {order} (neighbours on the last axis have consecutive numbers)",
            f"dp {layout.dp}: {rows} of {plan.global_batch} sequences each, in {layout.microbatches} microbatches of "
            f"{plan.rows}; zero {layout.zero}",
            f"pp {layout.pp}: {layout.num_stages} stages, schedule {plan.schedule.name}",
            f"tp {layout.tp}: {model.num_heads // layout.tp} of {model.num_heads} heads, "
            f"{model.vocab_size // layout.tp} of {model.vocab_size} vocabulary entries, "
            f"{between} of {tokens} tokens between the layers",
        ]
    )


def _shares(plan: Plan) -> list[list[str]]:
    """A row for each place in the pipeline: its ranks, layers and memory."""
    rows = [["ranks", "layers", "Ψ", *KINDS.values(), "MB"]]
    of_places: list[list[int]] = [[] for _ in range(plan.layout.pp)]
    for rank in range(plan.layout.num_ranks):
        of_places[plan.place(rank)].append(rank)
    for place in range(plan.layout.pp):
        held = step_memory(plan, place)
        layers = " + ".join(_layers(plan, stage) for stage in plan.stages(place))
        sizes = [f"{held[kind] / 1e6:.3f}" for kind in KINDS]
        rows.append([ranks_text(of_places[place]), layers, f"{plan.num_parameters(place):,}", *sizes, ""])
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


def table(rows: list[list[str]]) -> str:
    """Rows as columns side by side; words to the left, numbers to the right."""
    columns = list(zip(*rows, strict=True))
    wide = [max(map(len, column)) for column in columns]
    is_word = [i == 0 or not column[-1][:1].isdigit() for i, column in enumerate(columns)]
    return "\n".join(
        "  ".join(
            cell.ljust(size) if word else cell.rjust(size)
            for cell, size, word in zip(row, wide, is_word, strict=True)
        ).rstrip()
        for row in rows
    )
