"""A layer with experts as this library runs it: the weights that a rank holds, the rows that it computes, its messages.

The problem: all else in a step has a size before it starts, and the rows of an expert depend on what a router chose.
The idea: count even routing, where each expert gets as many rows from each rank. Then a layer with experts has sizes
like any.

Letters: E experts, k of them per token, N tokens of a rank, D width of the model, F width inside an expert, n ranks
that share the experts, t tensor-parallel ranks. A row is a token and one of its choices.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from lib.cost.comm import Calls, block_collectives, copied_heads_calls
from lib.cost.experts import experts_of_rank
from lib.cost.sizes import ModelShape, Weight, block_layers

INDEX = WIDE = 8  # bytes of a number of an expert or a row, int64; and of a load that is balanced, float64


@dataclass(frozen=True)
class Mixture:
    """The layers with experts of a model, and the ranks that share them.

    Args:
        shape: of the model; its context is the tokens that a rank has of each sequence.
        of_blocks: the numbers of the blocks that have experts.
        num_experts, top_k, width, d_shared: E, k, F, and the width of the MLP that computes every token; 0: none.
        renormalise: the gates of a token are divided by their sum.
        balance: tokens whose loads a balance loss compares, `batch` or `sequence`; empty: there is none.
        has_bias: a bias per expert takes part in the choice.
        capacity: rows that an expert takes, as a multiple of the even load; infinite: all.
        capacity_over: the tokens that share the capacity: of a `rank`, or of the `group` of n ranks.
        ranks: n.
    """

    shape: ModelShape
    of_blocks: tuple[int, ...]
    num_experts: int
    top_k: int
    width: int
    d_shared: int
    renormalise: bool
    balance: str
    has_bias: bool
    capacity: float
    capacity_over: str
    ranks: int

    @classmethod
    def of(cls, config: Any, shape: ModelShape, ranks: int, capacity_over: str) -> Mixture:
        """The experts of a `lib.model.GPTConfig`."""
        return cls(
            shape,
            tuple(filter(config.has_experts, range(config.num_layers))),
            config.experts,
            config.top_k,
            config.expert_width,
            config.d_shared,
            config.renormalise,
            config.balance_over if config.balance else "",
            config.bias_rate > 0,
            math.inf if config.capacity_factor is None else config.capacity_factor,
            capacity_over,
            ranks,
        )

    # ---- what a rank holds ------------------------------------------------------------------------------------------

    def num_here(self, place: int) -> int:
        """The experts on the rank at this place among the n ranks."""
        return len(experts_of_rank(self.num_experts, self.ranks, place))

    @property
    def is_alike(self) -> bool:
        """Whether all of the n ranks hold as many experts, and send and get as many rows."""
        has_turns = self.is_full and self.capacity_over == "group"  # then the first ranks fill the experts
        return self.num_experts % self.ranks == 0 and not has_turns

    def layers(self, layer: int, tp: int, place: int) -> list[list[Weight]]:
        """Weights of one layer with experts: of the router, of both layers of the shared MLP, and of the experts."""
        shape, name = self.shape, f"blocks.{layer}.mlp"
        each = self.num_here(place) * shape.d_model * self.width // tp
        router = [Weight(f"{name}.router.weight", self.num_experts * shape.d_model, True)]
        if self.has_bias:
            router.append(Weight(f"{name}.router.bias", self.num_experts, True, is_trained=False))
        experts = [("up", (2 if shape.gated else 1) * each), ("down", each)]
        routed = [Weight(f"{name}.experts.{what}", size, of_experts=True) for what, size in experts]
        *_, up, down = block_layers(replace(shape, d_mlp=self.d_shared or None), layer, tp)
        both = [[one._replace(name=one.name.replace(name, f"{name}.shared")) for one in part] for part in (up, down)]
        return [router, *(both if self.d_shared else ([], [])), routed]

    # ---- rows -------------------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether experts have a capacity."""
        return self.capacity < math.inf

    def load(self, rows: int, place: int) -> float:
        """The rows that each expert gets from the rank at this place: k·N/E, or as many as it has room for.

        Args:
            rows: sequences of a microbatch.
        """
        tokens = rows * self.shape.context
        even = self.top_k * tokens / self.num_experts
        if not self.is_full:
            return even
        if self.capacity_over == "rank":
            return min(even, math.ceil(self.capacity * even))
        return min(even, max(0.0, math.ceil(self.capacity * even * self.ranks) - place * even))

    def rows_to(self, rows: int, place: int, other: int) -> float:
        """The rows from the rank at one place that chose experts of the rank at the other."""
        return self.load(rows, place) * self.num_here(other)

    def exchanged(self, rows: int, place: int, other: int) -> float:
        """The rows that a rank sends to another in forward: its own there, and those of the other home."""
        return self.rows_to(rows, place, other) + self.rows_to(rows, other, place)

    def sent(self, rows: int, place: int) -> tuple[float, float]:
        """The rows that a rank sends to others: its own to their experts, and those that its experts computed, home."""
        others = [other for other in range(self.ranks) if other != place]
        return sum(self.rows_to(rows, place, i) for i in others), sum(self.rows_to(rows, i, place) for i in others)

    # ---- messages ---------------------------------------------------------------------------------------------------

    def calls(self, rows: int, itemsize: int, place: int, recompute: str = "none") -> Calls:
        """The collectives of the n ranks in one layer for one microbatch, forward and backward.

        Forward gathers E loads of each rank, and sends rows there and home; a capacity of the group needs loads, and a
        number of tokens, before. Backward sends the gradients of all rows back. `full` recomputation repeats those of
        forward. Of rows, the bytes are those that the rank at this place sends.
        """
        of_forward = 1 + (recompute == "full")
        calls = Counter({("all_gather", INDEX * self.num_experts * self.ranks): of_forward})
        if self.is_full and self.capacity_over == "group":
            calls["all_gather", INDEX * (self.num_experts + 1) * self.ranks] += of_forward
        for each in self.sent(rows, place):
            calls["all_to_all_rows", each * self.shape.d_model * itemsize] += of_forward + 1
        return calls

    def balance_calls(self, rows: int, recompute: str = "none") -> Calls:
        """The sum of loads over the ranks whose tokens are balanced together, in one layer for one microbatch."""
        of_each = {"": 0, "batch": 1, "sequence": rows}[self.balance]
        return Counter(
            {("all_reduce", WIDE * self.num_experts * of_each): bool(of_each) * (1 + (recompute == "full"))}
        )

    def block_calls(
        self,
        rows: int,
        itemsize: int,
        tp: int,
        recompute: str = "none",
        *,
        sequence_parallel: bool = False,
        regather: bool = True,
    ) -> Calls:
        """The tensor-parallel collectives of a block with experts for one microbatch, as `lib.cost.comm.block_calls`.

        Attention and a shared MLP have those of a column and a row layer. Experts get x and gates; with sequence
        parallelism also choices, from all ranks. Their outputs are partial sums. `full` stops before the last sum of
        forward, unless a balance loss comes behind it.
        """
        tokens = rows * self.shape.context
        x, gates = tokens * self.shape.d_model * itemsize, tokens * self.top_k * itemsize
        if sequence_parallel:
            last = "reduce_scatter", x
            there = [("all_gather", x), ("all_gather", gates), ("all_gather", tokens * self.top_k * INDEX), last]
            back = [("reduce_scatter", x), ("reduce_scatter", gates), ("all_gather", x)]
        else:
            last = "all_reduce", x
            there, back = [last], [last, ("all_reduce", gates)]
        calls = Counter((1 + (recompute == "full")) * there + back)
        of_two = block_collectives(recompute, sequence_parallel=sequence_parallel, regather=regather)
        for kind, n in of_two.items():
            calls[kind, x] += n // 2 * (1 + (self.d_shared > 0))
        calls[last] -= recompute == "full" and not self.balance
        return calls + copied_heads_calls(self.shape, itemsize, tp)
