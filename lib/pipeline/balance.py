"""Split layers into stages of neighbours, with the smallest maximum cost.

The problem: equal numbers of blocks are not equal work, because the head alone may cost as much as several blocks. The
idea: count multiplications, and split the list of counts so that the largest sum is as small as possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from lib.cost.sizes import ModelShape

if TYPE_CHECKING:
    from lib.model import GPTConfig


def balanced(costs: Sequence[float], num_parts: int) -> list[range]:
    """Split costs into parts of neighbours, with the smallest maximum cost. Raises ValueError if they are too few."""
    count = len(costs)
    if not 1 <= num_parts <= count:
        raise ValueError(f"{count} layers cannot be cut into {num_parts} stages; use {count} stages or fewer")
    sums = [0.0, *accumulate(costs)]
    best = {i: (total, [0, i]) for i, total in enumerate(sums)}  # of the first i, in 1 part
    for parts in range(2, num_parts + 1):
        ways = {}
        for i in range(parts, count + 1):  # k: where the last part begins
            ways[i] = min((max(best[k][0], sums[i] - sums[k]), [*best[k][1], i]) for k in range(parts - 1, i))
        best = ways
    return [range(a, b) for a, b in pairwise(best[count][1])]


def layer_costs(config: GPTConfig) -> list[float]:
    """Multiplications per token for each block and, last, for the head; the embedding is free."""
    block = ModelShape.of(config).num_block_weights + 2 * config.context * config.d_model
    matrices = 3 if config.llama else 2
    wider = config.top_k * config.expert_width + config.d_shared - config.mlp_width  # than the MLP in their place
    mixture = block + matrices * config.d_model * wider + config.d_model * config.experts
    blocks = [float(mixture if config.has_experts(layer) else block) for layer in range(config.num_layers)]
    return [*blocks, float(config.d_model * config.vocab_size)]


def layers_of_stages(config: GPTConfig, num_stages: int) -> list[range]:
    """The layers of a GPT in each stage, by cost; the head is the layer after the last block.

    Raises:
        ValueError: more stages than layers.
    """
    costs = layer_costs(config)
    if num_stages > len(costs):
        raise ValueError(
            f"{config.num_layers} blocks and a head cannot be cut into {num_stages} stages; use {len(costs)} stages or "
            "fewer"
        )
    return balanced(costs, num_stages)
