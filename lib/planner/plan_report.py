"""The report of a `Plan`: the exact bytes of a run of this library, and its messages."""

from __future__ import annotations

from itertools import accumulate, product

from lib.pipeline.gantt import gantt
from lib.pipeline.schedules.action import Op
from lib.planner.peak import not_counted, step_memory
from lib.planner.plan import Plan, step_bubble
from lib.planner.plan_messages import bytes_out_of_a_node, step_traffic
from lib.planner.report import KINDS, MOST_GANTT_ROWS, WIDTH, Report, axes_in_words, ranks_text


def report_of_plan(plan: Plan, ranks_per_node: int) -> Report:
    """The exact bytes of a run of this library, and its messages."""
    layout, places, differ = plan.layout, [], False
    for place in range(layout.pp):
        of_ranks = [step_memory(plan, place, cp_rank=rank) for rank in range(layout.cp)]
        held = max(of_ranks, key=lambda one: one["total"])
        ranks = [r for r in range(layout.num_ranks) if plan.place(r) == place]
        differ |= len(plan.ep_places) == 1 and len({one["activation"] for one in of_ranks}) > 1
        steps = ((op == Op.F) - (op in (Op.B, Op.W)) for _, op, _ in plan.schedule.actions[place])
        places.append(
            {
                "ranks": ranks_text(ranks),
                "layers": " + ".join(_layers(plan, stage) for stage in plan.schedule.stages_on(place)),
                "parameters": plan.num_parameters(place),
                "in_flight": max(accumulate(steps)) / layout.stages_per_rank,
                "held": {kind: held[name] for kind, name in KINDS.items()} | {"total": held["total"]},
            }
        )
    words = axes_in_words(
        plan.shape, plan.global_batch, layout.sizes, plan.schedule.name, layout.microbatches, layout
    )
    notes, waits = [f"not exact: {left_out}" for left_out in not_counted(plan)], []
    if layout.cp > 1:
        tokens = f"{plan.own.context} of {plan.shape.context} tokens of each sequence, {layout.token_order}"
        words.insert(3, f"cp {layout.cp}: {tokens}; attention by {layout.attention}")
    if plan.mixture is not None:
        words.append(_experts(plan))
    if differ:
        notes.insert(0, f"the {layout.cp} cp ranks attend to different numbers of keys: these bytes are the most")
    if layout.pp > 1:
        waits, (bubble, equal) = gantt(plan.timeline).splitlines(), step_bubble(plan)
        if len(waits) > MOST_GANTT_ROWS or max(map(len, waits)) > WIDTH:
            waits = [f"(its {len(waits)} rows are too large to be drawn here)"]
        waits.insert(0, f"bubble: {bubble:.1%} of all ranks' time (were all stages equal, {equal:.1%})")
    return Report(words, places, _plan_sends(plan, ranks_per_node), waits, notes)


def _experts(plan: Plan) -> str:
    """How the ranks with different tokens share the experts."""
    layout, mixture = plan.layout, plan.mixture
    most, least = mixture.num_here(0), mixture.num_here(layout.ep - 1)
    here = f"{most}" if most == least else f"{most} (on the last ranks {least}; the first are counted)"
    return (
        f"ep {layout.ep}: {here} of {mixture.num_experts} experts of a block, {mixture.top_k} for each token; "
        f"edp {layout.edp}: ranks that hold the same"
    )


def _layers(plan: Plan, stage: int) -> str:
    layers, head = plan.layers[stage], plan.model.num_layers
    words = "embed" * (stage == 0), ranks_text([layer for layer in layers if layer < head]), "head" * (head in layers)
    return " ".join(filter(None, words))


def _plan_sends(plan: Plan, ranks_per_node: int) -> list[dict]:
    """One for each kind on each axis."""
    of_places, sends = [step_traffic(plan, *at) for at in product(range(plan.layout.pp), plan.ep_places)], []
    for (kind, axis), leaves in bytes_out_of_a_node(plan, ranks_per_node).items():
        calls, sent = zip(*(traffic.get((kind, axis), (0, 0.0)) for traffic in of_places), strict=True)
        where = f"out of a node: {leaves / 1e6:.3f} MB" if leaves else "inside a node"
        each = {"calls": (min(calls), max(calls)), "bytes": (min(sent), max(sent))}
        sends.append({"what": f"{kind} {axis}", **each, "where": where})
    return sends
