"""Activations of one rank while it computes: a dry run of the GPT of `lib/model.py`, with buffers instead of tensors.

The problem: the activations that a microbatch keeps between forward and backward (`lib/cost/held.py`) are not the
peak. At the peak one layer computes, with all its temporary tensors: three copies of the logits in the loss, two
gradients of the widest activation in an MLP, a weight gradient before it is accumulated.
The idea: a buffer has a size and no values. Its bytes count while something refers to it, as with tensors. Each layer
returns its output, and its backwards: functions that refer to what autograd would save.

Letters: b sequences, s tokens of each, h width, t tensor-parallel ranks; x = b·s·h elements. Without dropout, and with
a fused attention.

Source: measured with `lib/memory.py`, operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lib.cost.buffer import Backward, Buffer
from lib.cost.live_context import ALONE, Across, Context
from lib.cost.live_experts import LiveExperts
from lib.cost.mixture import Mixture
from lib.cost.sizes import ModelShape, Weight, block_layers, embed_weights, head_weights, heads_of_rank, qkv_width


class LiveGPT:
    """The layers of a GPT on one tensor-parallel rank. A layer takes a buffer; it returns a buffer and its backwards.

    Args:
        seen: called whenever `live`, the bytes of all buffers, has grown.
        made: called with each weight whose gradient is computed, while this gradient is live.
        rows: sequences of a microbatch, b.
        itemsize: bytes of an element.
        sequence_parallel: shards of the sequence between the parallel layers.
        tied: one stage has the embedding and the head, which share a weight.
        context: this rank among the context-parallel ranks, of whose tokens it has some.
        mixture: the experts of some blocks, if it has any.
        place: this rank among those that share the experts.
    """

    def __init__(
        self,
        seen: Callable[[], None],
        made: Callable[[Weight], None],
        shape: ModelShape,
        rows: int,
        itemsize: int,
        tp: int,
        sequence_parallel: bool,
        tied: bool,
        context: Context = ALONE,
        mixture: Mixture | None = None,
        place: int = 0,
    ) -> None:
        self.live, self.seen, self.made = 0, seen, made
        self.shape, self.itemsize, self.tp = shape, itemsize, tp
        self.slices, self.tied, self.is_llama = sequence_parallel, tied, shape.gated
        self.own = shape.context // context.n  # tokens of each sequence
        self.tokens = rows * self.own
        self.copied = rows > 1  # a gather along dim 1 needs no copy if dim 0 has one sequence
        self.wide = self.tokens * max(itemsize, 4)  # one value per token, in float32 at least
        self.x = self.tokens * shape.d_model * itemsize  # full
        self.between = self.x // tp if sequence_parallel else self.x  # between the parallel layers
        self.mlp = self.tokens * shape.mlp_width // tp * itemsize
        self.qkv = self.tokens * qkv_width(shape, tp) * itemsize
        self.logits = self.tokens * shape.vocab_size // tp * itemsize
        self.across = Across(self, context, rows, *heads_of_rank(shape, tp)) if context.n > 1 else None
        self.experts = LiveExperts(self, mixture, rows, place) if mixture else None
        self.deferred: list[Backward] | None = None
        self.of_head: Buffer | None = None  # gradient of a tied weight, until the embedding adds to it

    def new(self, size: int) -> Buffer:
        """A buffer, which lives as long as something refers to it."""
        return Buffer(self, size)

    def temporary(self, size: int) -> None:
        """A buffer that is freed before the next line: it counts at the peak alone."""
        self.live += size
        self.seen()
        self.live -= size

    def grads(self, weights: list[Weight]) -> Buffer:
        return self.new(sum(weight.size for weight in weights) * self.itemsize)

    # ---- a stage ----------------------------------------------------------------------------------------------------

    def forward(self, x: Buffer | None, layers: range, deferred: list[Backward] | None) -> tuple:
        """The output of a stage (None of the last), and its backwards.

        Args:
            x: the input; None: tokens, to embed.
            layers: of the stage; the head is the layer after the last block.
            deferred: if backward is split into I and W, the list where I leaves W.
        """
        self.deferred, head = deferred, self.shape.num_layers
        of_stage = [(self.head,) if layer == head else (self.block, layer) for layer in layers]
        return self.chain(x, *of_stage) if x else self.chain(x, (self.embed,), *of_stage)

    def chain(self, x: Buffer | None, *layers: tuple) -> tuple:
        """Layers one after the other, each with its further arguments."""
        backwards = []
        for layer, *args in layers:
            x, *more = layer(x, *args)
            backwards += more
        return x, *backwards

    def backward(self, gradient: Any, backwards: list[Backward]) -> Any:
        """Run backwards, the last first, and free what they hold; return the input gradient."""
        while backwards:
            gradient, weights, grads = backwards.pop()(gradient)
            for weight in weights:
                self.made(weight)
            del grads
        return gradient

    def node(self, size: int | None, *saved: Buffer, weights: list[Weight] = (), brief: int = 0) -> Backward:
        """The backward of an operation that saved these buffers.

        Args:
            size: of the input gradient; None: the output gradient itself.
            brief: bytes that are freed when it ends.
        """

        def backward(gradient: Any, saved: tuple = saved) -> tuple:
            result, grads = gradient if size is None else self.new(size), self.grads(weights)
            self.temporary(brief)
            return result, weights, grads

        return backward

    # ---- between the parallel layers --------------------------------------------------------------------------------

    def gather(self, shard: Buffer) -> Buffer:
        """All-gather a shard, with a copy of dim 1 to the front and back."""
        if not self.slices:
            return shard
        full = self.new(self.x)
        self.temporary(self.x * self.copied)
        return full

    def reduce(self) -> Buffer:
        """All-reduce a partial sum; or reduce-scatter it, with what is sent and received in further buffers."""
        result = self.new(self.between)
        if self.slices:
            self.temporary(self.x + (self.x + self.between) * self.copied)
        return result

    def norm(self, x: Buffer, weights: list[Weight]) -> tuple:
        """A LayerNorm saves means and deviations; an RMSNorm reciprocal roots, and its normalised input."""
        size, of_token = self.between, self.between // self.shape.d_model
        if not self.is_llama:
            return self.new(size), self.node(size, x, self.new(2 * of_token), weights=weights)
        normalise = self.node(size, x, self.new(of_token), brief=3 * size)
        return self.new(size), normalise, self.node(size, self.new(size), weights=weights, brief=size)

    def residual(self, x: Buffer, *layers: tuple) -> tuple:
        """x + layers(x). In backward the sum comes before gradients of the first layer are accumulated."""
        _, *backwards = self.chain(x, *layers)
        of_first, others = backwards[:1], backwards[1:]

        def backward(gradient: Buffer) -> tuple:
            _, weights, grads = of_first.pop()(self.backward(gradient, others))
            return self.new(self.between), weights, grads

        return self.new(self.between), backward

    # ---- the parallel layers ----------------------------------------------------------------------------------------

    def column(self, x: Buffer, width: int, weights: list[Weight]) -> tuple:
        """x · W: gathers x, and keeps its shard to gather it again, or, if backward is split, x itself."""
        full, deferred = self.gather(x), self.deferred
        if deferred is None and not self.slices:
            return self.new(width), self.node(self.x, x, weights=weights)

        def in_halves(gradient: Buffer, full: Buffer = full) -> tuple:
            deferred.insert(0, self.node(None, gradient, full, weights=weights))
            partial = self.new(self.x)
            return self.reduce(), [], partial

        def in_flight(gradient: Buffer, shard: Buffer = x) -> tuple:
            """The gather of x, the matmul and the reduce-scatter of its result are in flight together."""
            buffers, result = self.new((3 + self.copied) * self.x), self.new(self.between)
            self.temporary(self.x * self.copied)
            grads = self.grads(weights)
            self.temporary(self.between * self.copied)
            del buffers
            return result, weights, grads

        return self.new(width), in_flight if deferred is None else in_halves

    def row(self, x: Buffer, weight: Weight, *bias: Weight) -> tuple:
        """x · W, a partial sum, all-reduced or reduce-scattered; then the bias is added."""
        deferred = self.deferred

        def backward(gradient: Buffer, x: Buffer = x) -> tuple:
            full, weights = self.gather(gradient), [weight]
            if deferred is None:
                return self.new(x.size), weights, self.grads(weights)
            deferred.insert(0, self.node(None, full, x, weights=weights))
            return self.new(x.size), [], None

        partial = self.new(self.x)
        y = self.reduce()
        if not bias:
            return y, backward
        y = self.new(self.between)
        del partial
        return y, backward, self.node(None, weights=[*bias])

    # ---- a block ----------------------------------------------------------------------------------------------------

    def block(self, x: Buffer, layer: int) -> tuple:
        norm1, qkv, out, norm2, up, down = block_layers(self.shape, layer, self.tp)
        gate_and_up = 2 * self.mlp if self.is_llama else self.mlp
        attention = (self.norm, norm1), (self.column, self.qkv, qkv), (self.attention,), (self.row, *out)
        mlp = (self.norm, norm2), (self.column, gate_and_up, up), (self.activation, self.mlp), (self.row, *down)
        if self.experts and layer in self.experts.mixture.of_blocks:
            mlp = (self.norm, norm2), (self.experts.layer, layer)
        return self.chain(x, (self.residual, *attention), (self.residual, *mlp))

    def attention(self, qkv: Buffer) -> tuple:
        """Saves queries, keys and values, its output, and an element per token and head."""
        size = self.qkv
        rotated = (size + self.x // self.tp) // 2  # queries and keys, which a Llama rotates
        backwards, saved = [self.node(size)], qkv  # in the end three gradients are concatenated
        if self.is_llama:
            angles = self.new(self.own * self.shape.d_model // self.shape.num_heads * max(self.itemsize, 4))
            saved = self.new(size)
            self.temporary(rotated)

            def rotate_back(gradient: Buffer, angles: Buffer = angles) -> tuple:
                return (gradient, self.new(rotated)), [], self.new(rotated + angles.size)

            backwards = [self.node(size), rotate_back, *backwards]
        if self.across:
            out, *of_ranks = self.across.attend(saved)
            return out, *backwards, *of_ranks
        logsumexp, out = self.new(self.wide * self.shape.num_heads // self.tp), self.new(self.x // self.tp)
        return out, *backwards, self.node(size, saved, logsumexp, out)

    def activation(self, up: Buffer, size: int) -> tuple:
        """GELU; or silu(gate) · up, with the gradients of both concatenated in the end."""
        if not self.is_llama:
            return self.new(size), self.node(size, up)
        silu = self.new(size)

        def of_product(gradient: Buffer, silu: Buffer = silu) -> tuple:
            """The gradients of silu(gate) and of up."""
            return (self.new(size), self.new(size)), [], None

        def of_silu(gradients: tuple[Buffer, Buffer], up: Buffer = up) -> tuple:
            _, of_up = gradients
            return (self.new(size), of_up), [], None

        return self.new(size), self.node(2 * size), of_silu, of_product

    # ---- the ends ---------------------------------------------------------------------------------------------------

    def embed(self, _: None) -> tuple:
        """Tokens to x: each rank looks up its own entries; the sum, or its shard, is added to the positions."""
        token, *positions = embed_weights(self.shape, self.tp)
        lookup = self.node(token.size * self.itemsize, self.new(8 * self.tokens))
        mask = self.node(self.x, self.new(self.tokens))  # of the entries of this rank
        entries = self.new(self.x)
        self.temporary(self.x)
        y = self.reduce()
        del entries

        def accumulate(gradient: Buffer) -> tuple:
            summed = self.new(gradient.size) if self.of_head else gradient
            self.of_head = None
            return None, [token], summed

        backwards = accumulate, lookup, mask, lambda gradient: (self.gather(gradient), [], None)
        if not positions:
            return y, *backwards
        indices, size = self.new(8 * self.own), positions[0].size * self.itemsize
        size = size // self.tp if self.slices else size
        summed = self.new(self.between)
        self.temporary(size)
        return summed, *backwards, self.node(None, indices, weights=positions, brief=size)

    def head(self, x: Buffer) -> tuple:
        *norm, linear = head_weights(self.shape, self.tp)
        return self.chain(x, (self.norm, norm), (self.unembed, linear), (self.loss,))

    def unembed(self, x: Buffer, weight: Weight) -> tuple:
        logits, backward = self.column(x, self.logits, [weight])

        def wait(gradient: Buffer) -> tuple:
            result, _, self.of_head = backward(gradient)
            return result, [], None

        return logits, wait if self.tied else backward

    def loss(self, _: Buffer) -> tuple:
        """At the peak: logits, logits minus their maximum, and exponentials of these."""
        powers = self.wide * self.shape.vocab_size // self.tp
        saved = self.new(powers), self.new(10 * self.tokens)
        self.temporary(powers + 8 * self.wide)
        return None, self.node(self.logits), self.node(powers, *saved, brief=2 * self.wide)
