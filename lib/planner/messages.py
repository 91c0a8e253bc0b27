"""Seconds of messages, and how many of them computation hides.

The problem: a planner that takes a fixed part of each message as hidden promises steps shorter than their messages,
and one that divides bytes by bandwidth has all clusters of a kind equally fast, however many ranks there are. The idea:

    a message   takes the latency of each step of its ring, and its bytes ÷ bandwidth
    it hides    behind the computation that runs meanwhile, and no longer than that lasts
    its rest    and at least a part that the software cannot hide, is what ranks wait for

Each second of computation hides one second of messages: those of tp, then cp, pp and dp take what is left.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from lib.cost.comm import messages_in_sequence, wire_bytes
from lib.planner.training import Training

# NCCL's own figures: to begin a collective; a step of a ring over NVLink, and over the network (protocol Simple); the
# same of a tree (LL128), which has 0.9 of the ring's bandwidth.
# Source: NVIDIA/nccl, `src/graph/tuning.cc` (commit 01afd20a), baseLat, hwLat and busBw.
BEGIN_S, LINK_STEP_S, NETWORK_STEP_S = 8.4e-6, 3.4e-6, 9.6e-6
TREE_BEGIN_S, TREE_LINK_S, TREE_NETWORK_S, TREE_BANDWIDTH = 4.4e-6, 1.2e-6, 8.5e-6, 0.9


class Messages(NamedTuple):
    """What a rank sends: bytes, and their seconds; `latency_s` is a part of `seconds`."""

    bytes: float
    seconds: float
    latency_s: float

    def times(self, n: float) -> Messages:
        """So many of them, one after the other."""
        return Messages(*(n * part for part in self))

    def __add__(self, more: Messages) -> Messages:  # type: ignore[override] a sum of parts, not a longer tuple
        return Messages(*(a + b for a, b in zip(self, more, strict=True)))


NONE = Messages(0.0, 0.0, 0.0)


class AxisWait(NamedTuple):
    """The messages of an axis in a step: their seconds are those that computation hides, and those that ranks wait."""

    messages: Messages
    beside_s: float = 0.0  # the computation that runs meanwhile, and has hidden nothing else
    hidden_s: float = 0.0

    @property
    def exposed_s(self) -> float:
        return self.messages.seconds - self.hidden_s

    def times(self, n: float) -> AxisWait:
        """So many of them, one after the other."""
        return AxisWait(self.messages.times(n), n * self.beside_s, n * self.hidden_s)

    def __add__(self, more: AxisWait) -> AxisWait:  # type: ignore[override] a sum of parts, not a longer tuple
        return AxisWait(self.messages + more.messages, self.beside_s + more.beside_s, self.hidden_s + more.hidden_s)


def hide(messages: Messages, beside_s: float, exposed: float = 0.0) -> AxisWait:
    """Hide messages behind so many seconds of computation; at least a part, `exposed` of 1, is waited for."""
    return AxisWait(messages, beside_s, min((1 - exposed) * messages.seconds, max(0.0, beside_s)))


def of_collective(
    training: Training, kind: str, payload_bytes: float, ranks: int, stride: int, calls: float = 1
) -> Messages:
    """A collective among ranks whose neighbours are `stride` apart, its payload in so many `calls`.
    An `all_reduce` is a ring or a tree, the shorter of both, as NCCL chooses; the rest are rings. (For one rank per
    node NCCL also has PAT, with log₂ n steps; it is not modelled.)
    """
    if ranks == 1 or not payload_bytes:
        return NONE
    ring_s, tree_s, bandwidth_Bps = _ways(training, ranks, stride)
    sent = wire_bytes(kind, payload_bytes, ranks)
    latency_s = calls * (BEGIN_S + messages_in_sequence(kind, ranks) / (ranks - 1) * ring_s)
    ring = Messages(sent, latency_s + sent / bandwidth_Bps, latency_s)
    if kind != "all_reduce":
        return ring
    latency_s = calls * (TREE_BEGIN_S + tree_s)
    tree = Messages(sent, latency_s + 2 * payload_bytes / (TREE_BANDWIDTH * bandwidth_Bps), latency_s)
    return min(ring, tree, key=lambda way: way.seconds)


def of_exchange(training: Training, payload_bytes: float, ranks: int, stride: int) -> Messages:
    """A rank keeps one of n pieces of its payload and sends the rest, a message to each rank, one after the other.

    Those that leave a node have the network card of its GPU to themselves, while the link has the rest.
    """
    if ranks == 1:
        return NONE
    cluster, stack = training.cluster, training.stack
    on_a_node = min(ranks, max(1, cluster.per_node // stride))
    near, far, piece = on_a_node - 1, ranks - on_a_node, payload_bytes / ranks
    latency_s = BEGIN_S + near * LINK_STEP_S + far * NETWORK_STEP_S
    longest_s = near * piece / (link_Bps := cluster.device.link_among(on_a_node) * stack.link_share)
    if far:
        card_Bps = min(link_Bps, (cluster.device.network_Bps or 0) * stack.network_share)
        longest_s = max(longest_s, far * piece / card_Bps)
    return Messages((near + far) * piece, latency_s + longest_s, latency_s)


@lru_cache(maxsize=4096)
def _ways(training: Training, ranks: int, stride: int) -> tuple[float, float, float]:
    """Latency of a ring that each rank passes once, and of a tree up and down; the bandwidth of both."""
    cluster = training.cluster
    on_a_node = min(ranks, max(1, cluster.per_node // stride))
    nodes = ranks / on_a_node
    ring_s = (ranks - nodes) * LINK_STEP_S + (nodes - 1) * NETWORK_STEP_S
    tree_s = 2 * ((on_a_node - 1) * TREE_LINK_S + math.log2(nodes) * TREE_NETWORK_S)
    return ring_s, tree_s, cluster.bandwidth(training.stack, ranks, stride)


def between_stages(training: Training, payload_bytes: float, ranks: int, stride: int) -> tuple[Messages, float]:
    """A message between neighbours of a pipeline where it takes longest; and the seconds of one over all p - 1 hops.

    One that leaves a node has the network card of its GPU to itself.
    """
    if ranks == 1:
        return NONE, 0.0
    cluster, stack = training.cluster, training.stack
    link_Bps = cluster.device.link_among(2) * stack.link_share
    link = Messages(payload_bytes, LINK_STEP_S + payload_bytes / link_Bps, LINK_STEP_S)
    out = math.ceil(ranks / max(1, cluster.per_node // stride)) - 1  # hops that leave a node
    if not out:
        return link, (ranks - 1) * link.seconds
    card_Bps = min(link_Bps, (cluster.device.network_Bps or 0) * stack.message_share)
    network = Messages(payload_bytes, NETWORK_STEP_S + payload_bytes / card_Bps, NETWORK_STEP_S)
    return network, out * network.seconds + (ranks - 1 - out) * link.seconds
