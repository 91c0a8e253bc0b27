"""Bytes that leave a node in a step, for each kind of message: what its network card has to carry.

A collective is a ring in the order of ranks, as in gloo, and of its ranks on a node only those send to another node
whose next rank is there. With t tensor-parallel ranks on two nodes that is one rank of each node, not t/2 of them. A
message of a pipeline leaves the node if its receiver is on another.
"""

from __future__ import annotations

from collections import Counter

from lib.pipeline.schedules.action import SENDS, Op
from lib.planner.plan import Plan
from lib.planner.traffic import step_traffic


def bytes_out_of_a_node(plan: Plan, ranks_per_node: int) -> dict[tuple[str, str], float]:
    """(kind, axis) → bytes per step that leave the node that sends most of it; consecutive ranks share a node."""
    sent_of = [step_traffic(plan, place) for place in range(plan.layout.pp)]
    most: dict[tuple[str, str], float] = {}
    for key in sorted({key for traffic in sent_of for key in traffic if key[0] != "recv"}):
        out: Counter[int] = Counter()
        for group in _groups(plan, key[1]):
            sends = [rank for rank in group if key in sent_of[plan.place(rank)]]
            for i, rank in enumerate(sends):
                calls, sent = sent_of[plan.place(rank)][key]
                if key[0] == "send":
                    crossing = sum(n for to, n in _receivers(plan, rank, group) if _cross(rank, to, ranks_per_node))
                    out[rank // ranks_per_node] += sent / calls * crossing
                elif _cross(rank, sends[(i + 1) % len(sends)], ranks_per_node):
                    out[rank // ranks_per_node] += sent
        most[key] = max(out.values(), default=0.0)
    return most


def _cross(one: int, other: int, ranks_per_node: int) -> bool:
    return one // ranks_per_node != other // ranks_per_node


def _groups(plan: Plan, axis: str) -> list[list[int]]:
    """The groups along an axis, several joined by ×, or the world."""
    along = plan.layout.sizes if axis == "world" else axis.split("×")
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(plan.layout.num_ranks):
        rest, where = rank, []
        for name, n in reversed(plan.layout.sizes.items()):
            rest, i = divmod(rest, n)
            where += [] if name in along else [i]
        groups.setdefault(tuple(where), []).append(rank)
    return list(groups.values())


def _receivers(plan: Plan, rank: int, pipeline: list[int]) -> list[tuple[int, int]]:
    """The ranks to which a rank of a pipeline sends in a step, and how often."""
    to: Counter[int] = Counter()
    for stage, op, _ in plan.schedule.actions[plan.place(rank)]:
        if op in SENDS:
            to[pipeline[plan.schedule.rank_of[stage + (1 if op == Op.SEND_F else -1)]]] += 1
    return list(to.items())
