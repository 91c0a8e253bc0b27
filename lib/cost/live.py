"""Bytes of activations that are live while a layer computes, operation by operation, for the GPT of `lib/model.py`.

The problem: the activations that a microbatch keeps between forward and backward (`lib/cost/held.py`) are not the
peak. At the peak one layer computes, with all its temporary tensors: three copies of the logits in the loss, two
gradients of the widest activation in an MLP, a weight gradient before it is accumulated.
The idea: a tape. Each operation allocates some bytes, then frees some; the tape keeps the sum and reports it. The
forward of a layer and its backward are each a dozen lines, in the order in which autograd executes them.

Letters: b sequences, s tokens of each, h width, a heads, V vocabulary, t tensor-parallel ranks; x = b·s·h elements.
Without dropout, and with a fused attention.

Source: measured with `lib/memory.py`, operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable

from lib.cost.sizes import ModelShape
from lib.cost.tensors import Weight, block_layers, embed_weights, head_weights, qkv_width


class Tape:
    """The live bytes of one action, counted from its start.

    Args:
        seen: called with the live bytes during each operation.
        gradient: called with each weight whose gradient is computed, and the live bytes, including this gradient.
    """

    def __init__(self, seen: Callable[[int], None], gradient: Callable[[Weight, int], None]) -> None:
        self.live, self.seen, self.gradient = 0, seen, gradient

    def op(self, makes: int, frees: int = 0) -> None:
        """An operation: it allocates its result; afterwards some tensors are freed."""
        self.live += makes
        self.seen(self.live)
        self.live -= frees

    def made(self, weights: list[Weight], frees: int) -> None:
        """Report the gradients of weights, which are among the live bytes until then."""
        for weight in weights:
            self.gradient(weight, self.live)
        self.live -= frees


class LiveGPT:
    """The tapes of the layers of a GPT on one tensor-parallel rank.

    Args:
        rows: sequences of a microbatch, b.
        itemsize: bytes of an element.
        sequence_parallel: shards of the sequence between the parallel layers.
        split: backward is split into I and W, and a weight gradient keeps its two factors until W.
    """

    def __init__(
        self, shape: ModelShape, rows: int, itemsize: int, tp: int, sequence_parallel: bool, split: bool
    ) -> None:
        self.shape, self.tp, self.itemsize = shape, tp, itemsize
        self.slices, self.split = sequence_parallel, split
        self.tokens = rows * shape.context
        self.copied = rows > 1  # a gather along dim 1 needs no copy if dim 0 has one sequence
        self.x = self.tokens * shape.d_model * itemsize  # full
        self.between = self.x // tp if sequence_parallel else self.x  # between the parallel layers
        # The means and deviations of a LayerNorm, or the reciprocal roots of an RMSNorm.
        self.stats = (1 if shape.llama else 2) * self.between // shape.d_model
        self.mlp = self.tokens * shape.mlp_width // tp * itemsize
        self.up = 2 * self.mlp if shape.llama else self.mlp  # with the gate
        self.qkv = self.tokens * qkv_width(shape, tp) * itemsize
        self.heads = self.x // tp
        self.turned = (self.qkv + self.heads) // 2  # queries and keys, which rotary embeddings rotate
        self.points = shape.context * shape.d_model // shape.num_heads * max(itemsize, 4)  # the angles
        self.logsumexp = self.tokens * shape.num_heads // tp * max(itemsize, 4)
        self.logits = self.tokens * shape.vocab_size // tp * itemsize

    # ---- between the parallel layers --------------------------------------------------------------------------------

    def gather(self, tape: Tape) -> int:
        """All-gather a shard, with a copy of dim 1 to the front and back; return the bytes of the full tensor."""
        if not self.slices:
            return 0
        part = self.between * self.copied
        tape.op(part + self.x, part)
        if self.copied:
            tape.op(self.x, self.x)
        return self.x

    def reduce(self, tape: Tape) -> None:
        """All-reduce a partial sum, or reduce-scatter it: what was sent and received is freed, and the shard kept."""
        if not self.slices:
            tape.op(self.x)
            return
        sent = self.x * self.copied
        tape.op(sent + self.between + self.x)
        tape.op(self.between * self.copied, sent + self.x + self.between * self.copied)

    def norm(self, tape: Tape) -> None:
        """A norm; RMSNorm also keeps its normalised input, before the product with its weight."""
        tape.op((2 if self.shape.llama else 1) * self.between + self.stats)

    def norm_backward(self, tape: Tape, weights: list[Weight], adds: bool = True, held: bool = False) -> None:
        """The input gradient, added to the gradient of the residual stream; frees the saved tensors of the norm.

        Args:
            adds: False for the last norm, after which there is no residual stream.
            held: the gradient of the residual stream is needed further.
        """
        grads = sum(weight.size for weight in weights) * self.itemsize
        if self.shape.llama:
            tape.op(2 * self.between + grads, 3 * self.between)  # products with the weight, and for it
            tape.op(4 * self.between, 5 * self.between + self.stats)
        else:
            tape.op(self.between + grads, 2 * self.between + self.stats)
        if adds:
            tape.op(self.between, self.between if held else 2 * self.between)
        tape.made(weights, grads)

    # ---- the parallel layers ----------------------------------------------------------------------------------------

    def column(self, tape: Tape, out: int) -> None:
        """x · W: gathers x, and keeps its shard, or, if backward is split, x itself."""
        whole = self.gather(tape)
        tape.op(out, self.between if self.split and whole else whole)

    def column_backward(self, tape: Tape, out: int, weights: list[Weight], held: bool = False) -> None:
        """From output gradient to input gradient; gathers the input again if forward kept only a shard of it.

        Args:
            held: the weight gradient waits for a second gradient of the same weight.
        """
        if self.split:
            tape.op(self.x)
            self.reduce(tape)
            tape.live -= self.x
            return
        again, mine = (self.x, self.between) if self.slices else (0, 0)
        part = mine * self.copied
        tape.op(part + again, part)
        tape.op(self.x)
        sums = again * self.copied + mine + again
        tape.op(sums)
        if again and self.copied:
            tape.op(again, again)
        grads = sum(weight.size for weight in weights) * self.itemsize
        tape.op(grads)
        if mine and self.copied:
            tape.op(mine, mine)
        tape.live -= out + self.between + 2 * again + sums - mine
        if not held:
            tape.made(weights, grads)

    def row(self, tape: Tape) -> None:
        """x · W, a partial sum; all-reduced or reduce-scattered; then the bias is added, and the residual stream."""
        tape.op(self.x)
        self.reduce(tape)
        if self.shape.llama:
            tape.live -= self.x
        else:
            tape.op(self.between, self.x + self.between)
        tape.op(self.between, self.between)

    def row_backward(self, tape: Tape, width: int, weight: Weight, *bias: Weight, keeps_input: bool = False) -> None:
        """From the gradient of the residual stream to the input gradient of the layer."""
        for one in bias:
            self.weight_gradients(tape, [one])
        whole = self.gather(tape)
        if self.split:
            tape.op(width)
            return
        grad = weight.size * self.itemsize
        tape.op(grad)
        tape.op(width, whole + (0 if keeps_input else width))
        tape.made([weight], grad)

    # ---- a block ----------------------------------------------------------------------------------------------------

    def block(self, tape: Tape) -> None:
        """Forward: the saved activations and the output of the block stay live."""
        self.norm(tape)
        self.column(tape, self.qkv)
        if self.shape.llama:  # rotated, into a new tensor
            tape.op(self.points + self.turned)
            tape.op(self.qkv, self.turned)
        tape.op(self.heads + self.logsumexp, self.qkv if self.shape.llama else 0)
        self.row(tape)
        self.norm(tape)
        self.column(tape, self.up)
        tape.op(self.up)  # GELU; or silu, and the product
        self.row(tape)

    def block_backward(self, tape: Tape, layer: int, held: bool) -> None:
        """Backward, from output gradient to input gradient; frees the saved activations.

        Args:
            held: the caller keeps the output gradient.
        """
        norm1, qkv, out, norm2, up, down = block_layers(self.shape, layer, self.tp)
        deferred = self.split and not self.slices  # then it is a factor of a weight gradient
        self.row_backward(tape, self.mlp, *down)
        if self.shape.llama:  # gradients of both factors, then gradients of gate and up concatenated
            tape.op(2 * self.mlp, 2 * self.mlp)
            tape.op(self.mlp, self.mlp + self.up)
            tape.op(self.up, self.up)
        else:
            tape.op(self.mlp, 2 * self.mlp)  # GELU
        self.column_backward(tape, self.up, up)
        self.norm_backward(tape, norm2, held=held or deferred)
        self.row_backward(tape, self.heads, *out, keeps_input=True)
        tape.op(self.qkv, self.qkv + self.logsumexp + self.heads * (1 if self.split else 2))
        tape.op(self.qkv, self.qkv)  # gradients of queries, keys and values concatenated
        if self.shape.llama:
            tape.op(2 * self.turned + self.points, self.turned + 2 * self.points)
            tape.op(self.qkv, self.qkv + self.turned)
        self.column_backward(tape, self.qkv, qkv)
        self.norm_backward(tape, norm1, held=deferred)

    def block_weight_gradients(self, tape: Tape, layer: int) -> None:
        """W of a split backward: each matmul frees its two factors."""
        _, qkv, out, _, up, down = block_layers(self.shape, layer, self.tp)
        self.weight_gradients(tape, down[:1], self.x + self.mlp)
        self.weight_gradients(tape, up, self.up + self.x)
        self.weight_gradients(tape, out[:1], self.x + self.heads)
        self.weight_gradients(tape, qkv, self.qkv + self.x)

    def weight_gradients(self, tape: Tape, weights: list[Weight], factors: int = 0) -> None:
        grads = sum(weight.size for weight in weights) * self.itemsize
        tape.op(grads, factors)
        tape.made(weights, grads)

    # ---- the ends ---------------------------------------------------------------------------------------------------

    def embed(self, tape: Tape) -> None:
        """Tokens to x: each rank looks up its own entries; the sum, or its shard, is added to the positions."""
        tape.live += 9 * self.tokens  # saved: indices of entries, and a mask of the entries of this rank
        tape.op(self.x)
        tape.op(self.x, self.x)
        self.reduce(tape)
        tape.live -= self.x
        if not self.shape.llama:
            positions = self.shape.context * self.shape.d_model * self.itemsize // (self.tp if self.slices else 1)
            tape.op(positions + 8 * self.shape.context)
            tape.op(self.between, self.between + positions)

    def embed_backward(self, tape: Tape, held: bool) -> None:
        """From the gradient of x to the gradients of positions and entries.

        Args:
            held: the gradient of the same weight from the head is live, and waits.
        """
        token, *positions = embed_weights(self.shape, self.tp)
        of_token = token.size * self.itemsize
        for position in positions:
            of_position = position.size * self.itemsize
            tape.op(of_position // (self.tp if self.slices else 1))
            tape.op(of_position, of_position // (self.tp if self.slices else 1))
            tape.made([position], of_position + 8 * self.shape.context)
        whole = self.gather(tape)
        tape.live -= self.between if whole else 0
        tape.op(self.x, self.x + self.tokens)
        tape.op(of_token, self.x + 8 * self.tokens)
        if held:
            tape.op(of_token, 2 * of_token)
        tape.made([token], of_token)

    def head(self, tape: Tape) -> None:
        """Last norm, logits, loss. At the peak: logits, logits minus their maximum, and exponentials of these."""
        self.norm(tape)
        self.column(tape, self.logits)
        wide = max(self.itemsize, 4) * self.tokens  # one value per token
        powers = wide * self.shape.vocab_size // self.tp
        tape.op(2 * powers + 8 * wide + 10 * self.tokens, self.logits + powers + 8 * wide)

    def head_backward(self, tape: Tape, held: bool) -> None:
        """From the loss to the output gradient of the last block.

        Args:
            held: the weight gradient waits for the gradient from the embedding.
        """
        wide = max(self.itemsize, 4) * self.tokens
        powers = wide * self.shape.vocab_size // self.tp
        tape.op(powers + 2 * wide, 2 * wide)
        tape.live -= 10 * self.tokens + 2 * powers - self.logits
        *norm, linear = head_weights(self.shape, self.tp)
        self.column_backward(tape, self.logits, [linear], held)
        self.norm_backward(tape, norm, adds=False)

    def head_weight_gradients(self, tape: Tape) -> None:
        """W of a split backward."""
        self.weight_gradients(tape, head_weights(self.shape, self.tp)[-1:], self.logits + self.x)
