"""A plan: a model, a batch and a layout; the stages, parameters and gradient buckets of each rank, and what it sends.

The problem: a run shows its messages and its memory when it ends, or when memory runs out. The idea: both follow from a
few numbers, so write the numbers into one object and compute the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from lib.cost.mixture import Mixture
from lib.cost.sizes import (
    BUCKET_BYTES,
    ModelShape,
    Weight,
    block_layers,
    bucket_shares,
    embed_weights,
    head_weights,
    recomputed_products,
)
from lib.layout import TOKEN_AXES, Layout
from lib.pipeline.balance import layer_costs, layers_of_stages
from lib.pipeline.lower import lower
from lib.pipeline.schedules.action import Schedule
from lib.pipeline.schedules.with_reduce import with_reduce
from lib.pipeline.simulate import Costs, Timeline, simulate

if TYPE_CHECKING:
    from lib.model import GPTConfig

AXES = "dp", "pp", "cp", "tp"  # for which there are formulas here of memory and messages


@dataclass(frozen=True)
class Plan:
    """A run, before it starts.

    Args:
        model: sizes of the GPT.
        layout: its distribution over ranks.
        global_batch: sequences of a step, over all ranks.
        itemsize: bytes of an element in computation and messages: 4 in float32.
        master_itemsize: bytes of an element of the master weights. None: the optimizer updates the weights themselves.
        bucket_bytes: size of a gradient bucket.
        corpus_bytes: size of the text from which each rank draws its batches.

    Raises:
        ValueError: a model and a batch that the layout cannot split, or an axis that a plan does not know.
    """

    model: GPTConfig
    layout: Layout
    global_batch: int
    itemsize: int = 4
    master_itemsize: int | None = None
    bucket_bytes: int = BUCKET_BYTES
    corpus_bytes: int = 0

    def __post_init__(self) -> None:
        self.layout.check(self.model, self.global_batch)
        for axis, ranks in self.layout.sizes.items():
            if ranks > 1 and axis not in AXES:
                raise ValueError(
                    f"a plan knows what ranks along {', '.join(AXES)} hold and send, and nothing of {axis}={ranks}: "
                    f"measure such a run (lib.train --profile), or plan it with {axis}=1"
                )

    @cached_property
    def shape(self) -> ModelShape:
        return ModelShape.of(self.model)

    @cached_property
    def own(self) -> ModelShape:
        """The shape whose context is the tokens that a rank has of each sequence."""
        return replace(self.shape, context=self.shape.context // self.layout.cp)

    @cached_property
    def mixture(self) -> Mixture | None:
        """The layers with experts, with even routing; None if there are none."""
        layout = self.layout
        return Mixture.of(self.model, self.own, layout.ep, layout.capacity_over) if self.model.experts else None

    @property
    def rows(self) -> int:
        """Sequences of a microbatch, b."""
        return self.global_batch // self.layout.dp // self.layout.microbatches

    @cached_property
    def schedule(self) -> Schedule:
        """The actions of the ranks of a pipeline, with all messages and sums."""
        return lower(with_reduce(self.layout.make_schedule(), each=self.layout.zero >= 2))

    @cached_property
    def layers(self) -> list[range]:
        """The layers of each stage; the head is the layer after the last block, the embedding is in stage 0."""
        return layers_of_stages(self.model, self.layout.num_stages)

    def place(self, rank: int) -> int:
        """Of a rank in the pipeline: its pp coordinate."""
        return self.layout.coordinates(rank)["pp"]

    def ep_place(self, rank: int) -> int:
        """Of a rank among those that share the experts; 0 if these are alike."""
        here = self.layout.coordinates(rank)
        return self.ep_rank(here["dp"], here.get("cp", 0)) if len(self.ep_places) > 1 else 0

    @property
    def ep_places(self) -> range:
        """Places among the ranks that share the experts at which ranks hold or send different numbers of bytes."""
        return range(1 if self.mixture is None or self.mixture.is_alike else self.layout.ep)

    def expert_layers(self, place: int) -> int:
        """How many blocks of a rank at this place in the pipeline have experts."""
        return sum(map(self.model.has_experts, self._blocks(place)))

    def _blocks(self, place: int) -> list[int]:
        layers = [layer for stage in self.schedule.stages_on(place) for layer in self.layers[stage]]
        return [layer for layer in layers if layer < self.model.num_layers]

    def ep_rank(self, dp_rank: int, cp_rank: int = 0) -> int:
        """The number of a rank among those that share the experts: neighbours along the axes with different tokens."""
        return self._token_rank(dp_rank, cp_rank) % self.layout.ep

    def _token_rank(self, dp_rank: int, cp_rank: int) -> int:
        """The number of a rank among those with different tokens."""
        return self._number({"dp": dp_rank, "cp": cp_rank}, TOKEN_AXES)

    def weights(self, stage: int, ep_rank: int = 0) -> list[Weight]:
        """Parameters of a stage, in the order of `named_parameters()`; a tied weight once."""
        tp, blocks = self.layout.tp, self.model.num_layers
        weights = embed_weights(self.shape, tp) if stage == 0 else []
        for layer in self.layers[stage]:
            if layer == blocks:
                weights += head_weights(self.shape, tp)
                continue
            of_block = block_layers(self.shape, layer, tp)
            if self.model.has_experts(layer):
                of_block[-2:] = self.mixture.layers(layer, tp, ep_rank)
            weights += sum(of_block, [])
        return list({weight.name: weight for weight in weights}.values())

    def buckets(self, place: int, ep_rank: int = 0) -> list[Bucketful]:
        """The gradient buckets of a rank, in the order of `lib.data_parallel.bucketed_gradients`.

        From the last parameter to the first; gradients with different groups or stages have separate buckets. With
        zero=3 one bucket per block: the embedding and the head first, then the blocks; and one of what is not trained.

        Args:
            ep_rank: among the ranks that share the experts. If they cannot be shared evenly, the first have one more.
        """
        zero, used, lines, buckets = self.layout.zero, {}, {}, []
        for weight, stages in self._used(place, ep_rank).items():
            if weight.is_trained or zero == 3:
                used[weight] = stages
        for weight, stages in used.items() if zero == 3 else reversed(used.items()):
            unit = weight.name.split(".")[1] if zero == 3 and weight.name.startswith("blocks.") else ""
            lines.setdefault((*self._sum_over(weight), stages, unit, weight.is_trained), []).append(weight)
        for (axes, ranks, stages, *_), line in lines.items():
            of_each = [weight.size * (self.master_itemsize or self.itemsize) for weight in line]
            for share in bucket_shares(of_each, sum(of_each) if zero == 3 else self.bucket_bytes):
                buckets.append(Bucketful(tuple(line[i] for i in share), axes, ranks, ranks if zero else 1, stages))
        return buckets

    def _used(self, place: int, ep_rank: int) -> dict[Weight, tuple[int, ...]]:
        """The parameters of a rank, and its stages that use each."""
        used: dict[Weight, tuple[int, ...]] = {}
        for stage in self.schedule.stages_on(place):
            for weight in self.weights(stage, ep_rank):
                used[weight] = (*used.get(weight, ()), stage)
        return used

    def num_parameters(self, place: int, ep_rank: int = 0) -> int:
        """Ψ of a rank at this place, not divided by d."""
        return sum(weight.size for weight in self._used(place, ep_rank))

    def _sum_over(self, weight: Weight) -> tuple[tuple[str, ...], int]:
        """Axes and number of ranks over which a gradient is summed."""
        layout, rank_of = self.layout, self.schedule.rank_of
        ranks = layout.dp * layout.cp
        if weight.of_experts and layout.ep > 1:
            return ("edp",), layout.edp  # tokens of all ranks that share the experts are already in it
        if self.shape.tied and weight.name == "embed.token.weight" and rank_of[0] != rank_of[-1]:
            return (*TOKEN_AXES, "pp"), 2 * ranks  # the first and the last stage share it from different ranks
        if layout.sequence_parallel and weight.whole:
            return (*TOKEN_AXES, "tp"), ranks * layout.tp  # each of t ranks holds it in full
        return TOKEN_AXES, ranks

    def place_in(self, bucket: Bucketful, place: int, dp_rank: int, tp_rank: int, cp_rank: int = 0) -> int:
        """The number of a rank among the ranks that shard a bucket."""
        if bucket.axes == ("edp",):
            return self._token_rank(dp_rank, cp_rank) // self.layout.ep
        return self._number({"dp": dp_rank, "cp": cp_rank, "tp": tp_rank, "pp": int(place > 0)}, bucket.axes)

    def _number(self, here: dict[str, int], axes: tuple[str, ...]) -> int:
        """The number of a rank at these coordinates among the ranks along some axes, of `pp` among both its ends."""
        number = 0
        for axis, size in self.layout.sizes.items():
            if axis in axes:
                number = number * (2 if axis == "pp" else size) + here[axis]
        return number

    def axis(self, *axes: str) -> str:
        """The name of a group along these axes, as in `lib.mesh`: without axes of one rank."""
        return "×".join([axis for axis in axes if getattr(self.layout, axis) > 1] or axes[:1])

    def group(self, *axes: str) -> tuple[str, int]:
        """The name of a group along these axes, and how many ranks it has."""
        return self.axis(*axes), math.prod(getattr(self.layout, axis) for axis in axes)

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step: a stage takes its multiplications, a backward two forwards, a message no time.

        A backward also takes what it recomputes, which is of blocks alone.
        """
        costs, blocks = layer_costs(self.model), self.model.num_layers
        again = [recomputed_products(self.shape, self.layout.recompute)] * blocks
        if self.layout.recompute == "full":
            again = costs[:blocks]
        forward = [sum(costs[layer] for layer in stage) for stage in self.layers]
        back = [
            one + sum(again[layer] for layer in stage if layer < blocks)
            for one, stage in zip(forward, self.layers, strict=True)
        ]
        return simulate(self.layout.make_schedule(), Costs(F=forward, I=back, W=forward))


@dataclass(frozen=True)
class Bucketful:
    """Gradients that are reduced together."""

    weights: tuple[Weight, ...]
    axes: tuple[str, ...]  # along which they are summed
    ranks: int  # over which they are summed
    shards: int  # of the sums; without ZeRO 1
    stages: tuple[int, ...]  # of this rank, that use the weights

    @property
    def line(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Buckets of one line are sent one at a time."""
        return self.axes, self.stages

    @property
    def crosses(self) -> bool:
        """Whether stages of other ranks also use the weights."""
        return "pp" in self.axes

    @cached_property
    def size(self) -> int:
        """Elements, padded with zeros to a multiple of the shards."""
        return -(-sum(weight.size for weight in self.weights) // self.shards) * self.shards


def step_bubble(plan: Plan) -> tuple[float, float]:
    """The idle fraction of the time of all ranks, from `simulate`: of these stages, and if all stages were equal."""
    return plan.timeline.bubble, simulate(plan.layout.make_schedule()).bubble
