"""Sizes of a model with experts, and the bytes of its messages: parameters in all, and those that a token multiplies.

The problem: Mixtral 8x7B has neither 8 · 7 nor 47 billion parameters in a step: it holds 46.7 billion, and a token
multiplies 12.9 billion of them. The idea: a dense model (`lib.cost.sizes`) whose MLP is replaced, in all or some
blocks, by a router and E experts; k of them compute a token.

Letters: E experts, k per token, F width inside an expert, D width of the model, n ranks that share the experts, N
tokens of these ranks together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lib.cost.sizes import ModelShape, qkv_width


@dataclass(frozen=True)
class LatentAttention:
    """Attention whose queries, keys and values come from vectors of low rank (MLA).

    Args:
        q_rank, kv_rank: widths of the two vectors of low rank; `q_rank` 0: queries come from the input.
        d_rope, d_nope, d_value: width of a head: of its part with positions, its part without, and its values.

    Source: DeepSeek-V2, 2024, section 2.1; key names as in its config.json.
    """

    q_rank: int
    kv_rank: int
    d_rope: int
    d_nope: int
    d_value: int

    def num_weights(self, d_model: int, num_heads: int) -> int:
        """Parameters of the attention of a block, with its two norms: DeepSeek-V3 has 187 million."""
        queries = num_heads * (self.d_nope + self.d_rope)
        down = d_model * self.q_rank + self.q_rank + self.q_rank * queries if self.q_rank else d_model * queries
        keys = d_model * (self.kv_rank + self.d_rope) + self.kv_rank
        return down + keys + num_heads * (self.kv_rank * (self.d_nope + self.d_value) + self.d_value * d_model)


@dataclass(frozen=True)
class ExpertShape:
    """The sizes of a decoder with experts.

    Args:
        base: embedding, attention, norms and head; its `mlp_width` is the MLP of blocks without experts.
        num_experts, top_k, d_expert: E, k, F.
        d_shared: width of the shared experts together, which compute every token.
        dense: places of the blocks that have an MLP and no experts.
        latent: attention of low rank; None: attention as in `base`.

    With `base.biases` "all" the router and the experts have biases, as in gpt-oss. Norms of queries and keys and the
    sinks of gpt-oss are not counted: 0.01 % of the parameters.

    Raises:
        ValueError: more experts per token than experts, an MLP without a gate, a block that the model does not have, or
            a model without experts.
    """

    base: ModelShape
    num_experts: int
    top_k: int
    d_expert: int
    d_shared: int = 0
    dense: tuple[int, ...] = ()
    latent: LatentAttention | None = None

    def __post_init__(self) -> None:
        layers = self.base.num_layers
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"{self.top_k} experts per token of {self.num_experts}; use 1 to {self.num_experts}")
        if not self.base.gated:
            raise ValueError("experts are counted as gated MLPs of three matrices; use a base with gated=True")
        if wrong := [place for place in self.dense if not 0 <= place < layers]:
            raise ValueError(f"block {wrong[0]} is none of the {layers} blocks; use places from 0 to {layers - 1}")
        if len(set(self.dense)) == layers:
            raise ValueError(f"none of the {layers} blocks has experts; count it as a dense model")

    @property
    def expert_parameters(self) -> int:
        """Of one expert: 3DF."""
        biases = 2 * self.d_expert + self.base.d_model if self.base.biases == "all" else 0
        return 3 * self.base.d_model * self.d_expert + biases

    @property
    def attention_parameters(self) -> int:
        """Of the attention and both norms of a block."""
        base = self.base
        if self.latent:
            return self.latent.num_weights(base.d_model, base.num_heads) + 2 * base.d_model
        qkv = base.d_q + 2 * base.d_kv
        biases = {"all": qkv + base.d_model, "qkv": qkv, "none": 0}[base.biases]
        return base.d_model * (qkv + base.d_q) + biases + 2 * base.d_model

    @property
    def end_parameters(self) -> int:
        """Of the token embedding; the head has the same number."""
        return self.base.vocab_size * self.base.d_model

    def replicated_parameters(self, blocks: range) -> int:
        """Of these blocks, all except the experts: attention, norms, routers, shared experts, dense MLPs."""
        base, without = self.base, self.num_dense(blocks)
        router = self.num_experts * (base.d_model + (base.biases == "all"))
        with_experts = (len(blocks) - without) * (router + 3 * base.d_model * self.d_shared)
        return len(blocks) * self.attention_parameters + with_experts + without * 3 * base.d_model * base.mlp_width

    def routed_parameters(self, blocks: range) -> int:
        """Of the experts of these blocks."""
        return (len(blocks) - self.num_dense(blocks)) * self.num_experts * self.expert_parameters

    def num_dense(self, blocks: range) -> int:
        """How many of these blocks have no experts."""
        return sum(place in blocks for place in set(self.dense))

    @property
    def num_parameters(self) -> int:
        """Of the full model, a tied weight counted once."""
        ends = self.end_parameters * (1 if self.base.tied else 2) + self.base.d_model
        return ends + self.replicated_parameters(self.blocks) + self.routed_parameters(self.blocks)

    @property
    def num_active_parameters(self) -> int:
        """Of these, the parameters that compute a token: all but E − k experts of each block that has them.

        It contains the token embedding, a table without a matmul. Publishers differ: the 12.9 billion of Mixtral
        contain it, the 3.6 and 5.1 billion of gpt-oss do not.
        """
        routed = self.routed_parameters(self.blocks)
        return self.num_parameters - routed + routed * self.top_k // self.num_experts

    @property
    def blocks(self) -> range:
        """The places of all blocks."""
        return range(self.base.num_layers)


# ---- activations ----------------------------------------------------------------------------------------------------


def attention_kept_bytes(shape: ExpertShape, tp: int = 1) -> float:
    """Bytes per token that a block keeps for backward apart from its MLP, in 16 bit and with fused attention.

    The inputs of both norms, of attention and of the MLP (8D), divided over tp by sequence parallelism; queries, keys
    and values, and the result of attention, divided by heads: as in `lib.cost.held.activation_bytes`. Attention of low
    rank also keeps both vectors of low rank before and after their norms, and has as many keys as queries.
    """
    base, latent = shape.base, shape.latent
    if not latent:
        return 8 * base.d_model / tp + 2 * qkv_width(base, tp) + 2 * base.d_q / tp
    heads = 2 * base.num_heads * (2 * (latent.d_nope + latent.d_rope) + 2 * latent.d_value)
    return (8 * base.d_model + 4 * (latent.q_rank + latent.kv_rank) + heads) / tp


def routed_kept_bytes(shape: ExpertShape, tp: int = 1, *, fused_swiglu: bool = True) -> float:
    """Bytes per token that its k routed copies keep for backward, in 16 bit: k · (2D + 6F/tp), for any number of ranks.

    A copy keeps the input of its expert, and gate, up and their product; 8F where kernels are not fused. The score of
    the router multiplies the product before the last matmul, so that no output is kept (as Megatron-LM does in
    `weighted_bias_swiglu_impl`). Routing is taken as even: a rank computes as many copies as its tokens send. Ranks
    along tp hold F/tp of each expert and all D elements of a copy. Scores of the router are not counted.
    """
    return shape.top_k * (2 * shape.base.d_model + (6 if fused_swiglu else 8) * shape.d_expert / tp)


def experts_of_rank(num_experts: int, ranks: int, rank: int) -> range:
    """The experts that a rank holds: neighbours, as evenly as possible; the first ranks have one more if need be."""
    each, more = divmod(num_experts, ranks)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


# ---- messages -------------------------------------------------------------------------------------------------------


def dispatch_bytes(shape: ExpertShape, tokens: float, ep: int, *, sends: int = 4, itemsize: int = 2) -> float:
    """Bytes that a rank sends in the all-to-alls of a layer: 4 · k · (N/n) · D · b · (n − 1)/n.

    Dispatch and combine, and backward of both, with even routing; a copy goes to each of the k experts, even if two
    are on the same rank.

    Args:
        tokens: N/n, of this rank.
        ep: n, ranks that share the experts.
        sends: 4; 6 where backward computes the block again.
        itemsize: b, bytes of an element of a message.

    Source: counted from the definition; DeepSeek-V3 (2024), section 3.2, describes both all-to-alls.
    """
    return sends * shape.top_k * tokens * shape.base.d_model * itemsize * (ep - 1) / ep


def any_of_experts(num_experts: int, top_k: int, share: float) -> float:
    """How probable it is that a share of the experts has any of the k experts of a token; uniform choices.

    1 − C(E − E · share, k)/C(E, k).
    """
    outside = num_experts - round(num_experts * share)
    return 1 - math.comb(outside, top_k) / math.comb(num_experts, top_k)


def distinct_groups(num_experts: int, top_k: int, groups: int) -> float:
    """Groups of experts that the k experts of a token are in, the mean over uniform choices.

    n · (1 − C(E − E/n, k)/C(E, k)): the factor instead of k if a token goes to each rank, or to each node, once.

    Raises:
        ValueError: groups of unequal size.
    """
    if groups < 1 or num_experts % groups:
        raise ValueError(f"{num_experts} experts cannot be in {groups} equal groups; use a divisor")
    return groups * any_of_experts(num_experts, top_k, 1 / groups)
