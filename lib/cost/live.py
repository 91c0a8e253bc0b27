"""Bytes of activations that are live while a layer computes, operation by operation, as `lib/model.py` does it.

The problem: what a microbatch keeps between forward and backward (`lib/cost/saved.py`) is not the peak. At the peak one
layer is at work, with everything it makes and frees on the way: three copies of the logits in the loss, two gradients
of the widest activation in an MLP, a weight's gradient before it is added up.
The idea: a tape. Each operation makes some bytes, then frees some; the tape keeps the sum and the highest sum. The
forward of a layer and its backward are each a dozen lines, in the order in which autograd goes through them.

Letters: b sequences, s tokens of each, h width, a heads, V vocabulary, t tensor-parallel ranks; x = b·s·h elements.
Without dropout, and with a fused attention.

Source: measured with `lib/memory.py`, operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable

from lib.cost.sizes import ModelShape
from lib.cost.tensors import Weight, block_layers, embed_weights, head_weights, qkv_width


class Tape:
    """The live bytes of one action, counted from its beginning.

    Args:
        seen: called after each operation, with the live bytes of that moment.
        gradient: called with each weight whose gradient is made, and the live bytes, this gradient among them.
    """

    def __init__(self, seen: Callable[[int], None], gradient: Callable[[Weight, int], None]) -> None:
        self.live, self.seen, self.gradient = 0, seen, gradient

    def op(self, makes: int, frees: int = 0) -> None:
        """An operation that allocates its result, and after which some other tensors are freed."""
        self.live += makes
        self.seen(self.live)
        self.live -= frees

    def made(self, weight: Weight) -> None:
        """A weight's gradient, which is live, is handed over."""
        self.gradient(weight, self.live)


class LiveGPT:
    """The tapes of a GPT's layers on one tensor-parallel rank.

    Args:
        rows: sequences of a microbatch, b.
        itemsize: bytes of an element.
        sequence_parallel: slices of the sequence between the parallel layers.
        split: backward comes in halves, and a weight gradient keeps its two factors until the second.
    """

    def __init__(
        self, shape: ModelShape, rows: int, itemsize: int, tp: int, sequence_parallel: bool, split: bool
    ) -> None:
        self.shape, self.tp, self.itemsize = shape, tp, itemsize
        self.slices, self.split = sequence_parallel, split
        self.tokens = rows * shape.context
        self.copied = rows > 1  # dim 1 of one row is in front already, so a gather along it needs no copy
        self.x = self.tokens * shape.d_model * itemsize  # whole
        self.between = self.x // tp if sequence_parallel else self.x  # between the parallel layers
        # The means and deviations of a norm, or its roots.
        self.stats = (1 if shape.llama else 2) * self.between // shape.d_model
        self.mlp = self.tokens * shape.mlp_width // tp * itemsize
        self.up = 2 * self.mlp if shape.llama else self.mlp  # with the gate
        self.qkv = self.tokens * qkv_width(shape, tp) * itemsize
        self.heads = self.x // tp
        self.turned = (self.qkv + self.heads) // 2  # queries and keys
        self.points = shape.context * shape.d_model // shape.num_heads * max(itemsize, 4)  # by which they are turned
        self.logsumexp = self.tokens * shape.num_heads // tp * max(itemsize, 4)
        self.logits = self.tokens * shape.vocab_size // tp * itemsize

    # ---- between the parallel layers --------------------------------------------------------------------------------

    def gather(self, tape: Tape) -> int:
        """A slice made whole, its own part copied to the front and the result back; what it leaves."""
        if not self.slices:
            return 0
        part = self.between * self.copied
        tape.op(part + self.x, part)
        if self.copied:
            tape.op(self.x, self.x)
        return self.x

    def scatter(self, tape: Tape) -> None:
        """A term of a sum: what goes to the others, what comes from them, and their sum, which it leaves."""
        sent = self.x * self.copied
        tape.op(sent + self.between + self.x)
        tape.op(self.between * self.copied, sent + self.x + self.between * self.copied)

    def norm(self, tape: Tape) -> None:
        """RMSNorm keeps what it has normalised, before its weight."""
        tape.op((2 if self.shape.llama else 1) * self.between + self.stats)

    def norm_backward(self, tape: Tape, weights: list[Weight], adds: bool = True, held: bool = False) -> None:
        """The gradient of its input, which is added to that of the residual stream; frees what it saved.

        Args:
            adds: False for the last norm, after which there is no residual stream.
            held: the residual stream's gradient is needed further.
        """
        grads = sum(weight.size for weight in weights) * self.itemsize
        if self.shape.llama:
            tape.op(2 * self.between + grads, 3 * self.between)  # products with the weight, and for it
            tape.op(4 * self.between, 5 * self.between + self.stats)
        else:
            tape.op(self.between + grads, 2 * self.between + self.stats)
        if adds:
            tape.op(self.between, self.between if held else 2 * self.between)
        for weight in weights:
            tape.made(weight)
        tape.live -= grads

    # ---- the parallel layers ----------------------------------------------------------------------------------------

    def column(self, tape: Tape, out: int) -> None:
        """x · W: gathers x, and keeps its slice, or, where backward is split, x itself."""
        whole = self.gather(tape)
        tape.op(out, self.between if self.split and whole else whole)

    def column_backward(self, tape: Tape, out: int, weights: list[Weight], held: bool = False) -> None:
        """From the gradient of the output to that of the input; gathers the input again if only a slice was kept.

        Args:
            held: the weight's gradient waits for another one of the same weight.
        """
        if self.split:
            tape.op(self.x)
            if self.slices:
                self.scatter(tape)
            else:
                tape.op(self.x)
            tape.live -= self.x
            return
        again = self.x if self.slices else 0
        part = self.between * self.copied if self.slices else 0
        tape.op(part + again, part)
        tape.op(self.x)
        sums = self.x * self.copied + self.between + self.x if self.slices else 0
        tape.op(sums)
        if again and self.copied:
            tape.op(self.x, self.x)
        grads = sum(weight.size for weight in weights) * self.itemsize
        tape.op(grads)
        mine = self.between if self.slices else 0
        if mine and self.copied:
            tape.op(mine, mine)
        tape.live -= out + self.between + again + sums - mine + (self.x if self.slices else 0)
        for weight in weights[:0] if held else weights:
            tape.made(weight)
        tape.live -= 0 if held else grads

    def row(self, tape: Tape) -> None:
        """x · W, a term of a sum; summed or scattered; then the bias is added, and the residual stream."""
        tape.op(self.x)
        if self.slices:
            self.scatter(tape)
        else:
            tape.op(self.x)
        if self.shape.llama:
            tape.live -= self.x
        else:
            tape.op(self.between, self.x + self.between)
        tape.op(self.between, self.between)

    def row_backward(self, tape: Tape, width: int, weight: Weight, *bias: Weight, keeps_input: bool = False) -> None:
        """From the gradient of the residual stream to that of the layer's input."""
        for one in bias:
            tape.op(one.size * self.itemsize)
            tape.made(one)
            tape.live -= one.size * self.itemsize
        whole = self.gather(tape)
        if self.split:
            tape.op(width)
            return
        grad = weight.size * self.itemsize
        tape.op(grad)
        tape.op(width, whole + (0 if keeps_input else width))
        tape.made(weight)
        tape.live -= grad

    # ---- a block ----------------------------------------------------------------------------------------------------

    def block(self, tape: Tape) -> None:
        """Forward: what stays is saved, and the block's output."""
        self.norm(tape)
        self.column(tape, self.qkv)
        if self.shape.llama:  # turned, into a new tensor
            tape.op(self.points + self.turned)
            tape.op(self.qkv, self.turned)
        tape.op(self.heads + self.logsumexp, self.qkv if self.shape.llama else 0)
        self.row(tape)
        self.norm(tape)
        self.column(tape, self.up)
        tape.op(self.up)  # GELU; or silu, and the product
        self.row(tape)

    def block_backward(self, tape: Tape, layer: int, held: bool) -> None:
        """Backward, from the gradient of the output to that of the input; frees what forward has saved.

        Args:
            held: whoever brought the gradient of the output keeps it.
        """
        norm1, qkv, out, norm2, up, down = block_layers(self.shape, layer, self.tp)
        deferred = self.split and not self.slices  # then it is a factor of a weight's gradient
        self.row_backward(tape, self.mlp, *down)
        if self.shape.llama:  # both factors' gradients, then gate's and up's side by side
            tape.op(2 * self.mlp, 2 * self.mlp)
            tape.op(self.mlp, self.mlp + self.up)
            tape.op(self.up, self.up)
        else:
            tape.op(self.mlp, 2 * self.mlp)  # GELU
        self.column_backward(tape, self.up, up)
        self.norm_backward(tape, norm2, held=held or deferred)
        self.row_backward(tape, self.heads, *out, keeps_input=True)
        tape.op(self.qkv, self.qkv + self.logsumexp + self.heads * (1 if self.split else 2))
        tape.op(self.qkv, self.qkv)  # queries', keys' and values' gradients side by side
        if self.shape.llama:
            tape.op(2 * self.turned + self.points, self.turned + 2 * self.points)
            tape.op(self.qkv, self.qkv + self.turned)
        self.column_backward(tape, self.qkv, qkv)
        self.norm_backward(tape, norm1, held=deferred)

    def block_weight_gradients(self, tape: Tape, layer: int) -> None:
        """The second half of a split backward: each product frees its two factors."""
        _, qkv, out, _, up, down = block_layers(self.shape, layer, self.tp)
        for weights, factors in (
            (down[:1], self.x + self.mlp),
            (up, self.up + self.x),
            (out[:1], self.x + self.heads),
            (qkv, self.qkv + self.x),
        ):
            self.weight_gradients(tape, weights, factors)

    def weight_gradients(self, tape: Tape, weights: list[Weight], factors: int) -> None:
        grads = sum(weight.size for weight in weights) * self.itemsize
        tape.op(grads, factors)
        for weight in weights:
            tape.made(weight)
        tape.live -= grads

    # ---- the ends ---------------------------------------------------------------------------------------------------

    def embed(self, tape: Tape) -> None:
        """Tokens to x: each rank looks up its own entries, and the sum, or its slice, is added to the positions."""
        tape.live += 9 * self.tokens  # entries, and which are here: saved
        tape.op(self.x)
        tape.op(self.x, self.x)
        if self.slices:
            self.scatter(tape)
        else:
            tape.op(self.x)
        tape.live -= self.x
        if not self.shape.llama:
            positions = self.shape.context * self.shape.d_model * self.itemsize // (self.tp if self.slices else 1)
            tape.op(positions + 8 * self.shape.context)
            tape.op(self.between, self.between + positions)

    def embed_backward(self, tape: Tape, held: bool) -> None:
        """From the gradient of x to those of positions and entries.

        Args:
            held: the head's gradient of the same weight is there, and waits.
        """
        token, *positions = embed_weights(self.shape, self.tp)
        of_token = token.size * self.itemsize
        for position in positions:
            of_position = position.size * self.itemsize
            tape.op(of_position // (self.tp if self.slices else 1))
            tape.op(of_position, of_position // (self.tp if self.slices else 1))
            tape.made(position)
            tape.live -= of_position + 8 * self.shape.context
        whole = self.gather(tape)
        tape.live -= self.between if whole else 0
        tape.op(self.x, self.x + self.tokens)
        tape.op(of_token, self.x + 8 * self.tokens)
        if held:
            tape.op(of_token, 2 * of_token)
        tape.made(token)
        tape.live -= of_token

    def head(self, tape: Tape) -> None:
        """The last norm, the logits, and the loss: logits, the same less their maximum, and their powers at once."""
        self.norm(tape)
        self.column(tape, self.logits)
        wide = max(self.itemsize, 4) * self.tokens  # a number for each token
        powers = wide * self.shape.vocab_size // self.tp
        tape.op(2 * powers + 8 * wide + 10 * self.tokens, self.logits + powers + 8 * wide)

    def head_backward(self, tape: Tape, held: bool) -> None:
        """From the loss to the gradient of the last block's output.

        Args:
            held: the gradient of the weight waits for the embedding's.
        """
        wide = max(self.itemsize, 4) * self.tokens
        powers = wide * self.shape.vocab_size // self.tp
        tape.op(powers + 2 * wide, 2 * wide)
        tape.live -= 10 * self.tokens + 2 * powers - self.logits
        *norm, linear = head_weights(self.shape, self.tp)
        self.column_backward(tape, self.logits, [linear], held)
        self.norm_backward(tape, norm, adds=False)

    def head_weight_gradients(self, tape: Tape) -> None:
        """The second half of a split backward."""
        self.weight_gradients(tape, head_weights(self.shape, self.tp)[-1:], self.logits + self.x)
