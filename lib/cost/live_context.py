"""Activations of context-parallel attention: a dry run of `lib/context_parallel`, as in `lib/cost/live.py`.

A rank has the queries of t = T/n tokens. Gathered keys and values are kept until backward, with a mask of the dtype of
x for queries that do not see all of their keys. A ring keeps nothing of other ranks, and its blocks need their scores.
Ulysses keeps queries, keys and values of all tokens, for some heads, instead of those of all heads.

Letters: as in `live.py`; n context-parallel ranks; H query heads and K heads of keys and values on this rank; one
`head` is the bytes of t tokens, of all sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lib.cost.buffer import Backward, Buffer
from lib.cost.token_orders import AttentionBlock, blocks_of, tokens_of_rank


class Context(NamedTuple):
    """A rank among those that split a sequence: `attention` and `order` of tokens as in `lib.layout.Layout`."""

    n: int = 1
    rank: int = 0
    attention: str = "gather"
    order: str = "contiguous"


ALONE = Context()


class _Part(NamedTuple):
    """Queries of a rank that attend to the keys in front of `end`, and what is kept of them."""

    end: int
    size: int
    kept: tuple[Buffer, ...]


@dataclass
class Across:
    """Attention across ranks, in the buffers of `model`. Each way returns its output, and its backwards."""

    model: Any  # a `LiveGPT`
    context: Context
    rows: int
    heads: int
    kv_heads: int

    def __post_init__(self) -> None:
        shape, itemsize = self.model.shape, self.model.itemsize
        self.length, self.own = shape.context, shape.context // self.context.n
        self.element = self.rows * shape.d_head * itemsize  # of one token and head, in all sequences
        self.head = self.element * self.own
        self.q, self.kv = self.heads * self.head, 2 * self.kv_heads * self.head
        self.of_token = self.rows * self.heads * max(itemsize, 4)  # one value per query and head
        self.copied = self.rows > 1  # a rank's heads of several sequences do not follow each other

    def attend(self, qkv: Buffer) -> tuple:
        return {"gather": self.gather, "ring": self.ring, "ulysses": self.ulysses}[self.context.attention](qkv)

    def _replaced(self, *places: int, size: int = 0) -> Backward:
        """A backward that replaces gradients in a list by copies, of this size or of their own."""

        def backward(gradients: list[Buffer]) -> tuple:
            for i in places:
                gradients[i] = self.model.new(size or gradients[i].size)
            return gradients, [], None

        return backward

    # ---- gather -----------------------------------------------------------------------------------------------------

    def gather(self, qkv: Buffer) -> tuple:
        model, n = self.model, self.context.n
        part, full = model.new(self.kv), model.new(n * self.kv)
        del part
        places = None
        if self.context.order != "contiguous":
            places = model.new(8 * self.length)
            model.temporary(16 * self.length)
            where = model.new(8 * self.length)
            full = model.new(n * self.kv)
            del where
        parts = [self._part(queries) for queries in tokens_of_rank(self.context.order, self.length, *self._me)]
        out = model.new(self.q) if len(parts) > 1 else parts[0].kept[0]
        return (
            out,
            self._scattered,
            self._ordered(places),
            self._side_by_side,
            self._padded,
            self._of(parts, qkv, full),
        )

    @property
    def _me(self) -> tuple[int, int]:
        return self.context.n, self.context.rank

    def _part(self, queries: range) -> _Part:
        """Attention of these queries: its output, an element per query and head, and perhaps a mask."""
        model, t, end = self.model, len(queries), queries[-1] + 1
        masked = queries != range(end)
        earlier = model.new(t * end * masked)
        model.temporary(8 * (t + end) * masked)  # positions
        mask = model.new(t * end * model.itemsize * masked)
        logsumexp, size = model.new(self.of_token * t), self.heads * self.element * t
        part = _Part(end, size, (model.new(size), logsumexp, mask))
        del earlier
        return part

    def _of(self, parts: list[_Part], *saved: Buffer) -> Backward:
        """The gradients of queries, keys and values: the last part first; that of the output lives through all."""

        def backward(gradient: Buffer, saved: Sequence[Buffer] = saved) -> tuple:
            found: list = []
            while parts:
                part = parts.pop()
                found += [self.model.new(self.kv_heads * self.element * part.end) for _ in range(2)]
                found.insert(0, self.model.new(part.size))
                del part
                if parts:
                    self._pad(found)
            return found, [], None

        return backward

    def _pad(self, found: list[Buffer]) -> None:
        """Gradients of some keys and values become those of all, and are added to those of the part before."""
        whole, earlier = self.context.n * self.kv // 2, len(found) > 4
        for last in (-1, -2):
            if found[last].size < whole:
                found[last] = self.model.new(whole)
            if earlier:
                found[last - 2] = self.model.new(whole)
                found[last] = None
        if earlier:
            del found[-2:]

    def _padded(self, found: list[Buffer]) -> tuple:
        self._pad(found)
        found[:-2] = [self.model.new(self.q)]
        return found, [], None

    def _side_by_side(self, found: list[Buffer]) -> tuple:
        found[1:] = [self.model.new(self.context.n * self.kv)]
        return found, [], None

    def _ordered(self, places: Buffer | None) -> Backward:
        def backward(found: list[Buffer], places: Buffer | None = places) -> tuple:
            if places:
                found[1] = self.model.new(found[1].size)
            return found, [], None

        return backward

    def _scattered(self, found: list[Buffer]) -> tuple:
        mine, came = self.model.new(self.kv), self.model.new(found[1].size)
        del came
        found[1] = mine
        return found, [], None

    # ---- ulysses ----------------------------------------------------------------------------------------------------

    def ulysses(self, qkv: Buffer) -> tuple:
        model, n = self.model, self.context.n
        copies = self.kv_heads < n
        of_kv = max(n, self.kv_heads) * self.head
        saved = [self._exchanged(self.q)]
        for _ in range(2):
            heads = model.new(of_kv * copies)
            saved.append(self._exchanged(of_kv))
            del heads
        logsumexp, y = model.new(self.of_token * self.own), model.new(self.q)
        out = self._exchanged(self.q, self.copied)

        def of_attention(gradient: Buffer, saved: Sequence[Buffer] = (*saved, logsumexp, y)) -> tuple:
            return [model.new(size) for size in (self.q, of_kv, of_kv)], [], None

        def back(gradients: list[Buffer]) -> tuple:
            for i in (2, 1, 0):
                gradients[i] = self._exchanged(gradients[i].size, self.copied)
                if i and copies:
                    gradients[i] = model.new(self.kv // 2)
            return gradients, [], None

        ends = [self._replaced(1, 2)] if copies else []
        return out, *ends, back, of_attention, lambda gradient: (self._exchanged(self.q), [], None)

    def _exchanged(self, size: int, copies: bool = True) -> Buffer:
        """What an all-to-all returns; it sends slices side by side, and puts together what came."""
        sent, came = self.model.new(size * copies), self.model.new(size)
        result = self.model.new(size)
        del sent, came
        return result

    # ---- ring -------------------------------------------------------------------------------------------------------

    def ring(self, qkv: Buffer) -> tuple:
        out, logsumexp = self.model.new(self.q), self.model.new(self.of_token * self.own)
        for blocks, _ in self._passing():
            for block in blocks:
                self._block(block)
        return out, self._replaced(1, 2), self._separate, self._ring_backward(qkv, out, logsumexp)

    def _passing(self) -> Sequence:
        """For each step its blocks; meanwhile keys and values are here, and the next are on their way."""
        (n, rank), order = self._me, self.context.order
        here = self.model.new(self.kv)
        for step in range(n):
            coming = self.model.new(self.kv) if step + 1 < n else None
            yield blocks_of(order, self.length, n, rank, (rank - step) % n), step
            here = coming
        del here

    def _sizes(self, block: AttentionBlock) -> tuple[int, int, int, int]:
        """Bytes of queries and of keys of a block, in all query heads; of copies of keys; of scores."""
        t, s = len(block.queries), len(block.keys)
        q, k = (self.heads * self.element * size for size in (t, s))
        copies = self.kv_heads < self.heads and self.rows * self.kv_heads > 1
        return q, k, k * copies, self.of_token * t * s

    def _block(self, block: AttentionBlock) -> None:
        """A block of forward: scores, their exponentials in place, the output of the block, its merge."""
        q, _, copies, scores = self._sizes(block)
        t, s = len(block.queries), len(block.keys)
        lse, mask = self.of_token * t, (t * s + 8 * (t + s)) * (not block.is_whole)
        peaks = q * self.copied + copies + scores, scores + mask, scores + lse + copies + q, 2 * q + 3 * lse
        self.model.temporary(max(peaks))

    def _block_backward(self, block: AttentionBlock) -> None:
        """A block of backward: its weights, their gradients, and in turn the gradients of queries, keys, values."""
        q, k, copies, scores = self._sizes(block)
        t, s = len(block.queries), len(block.keys)
        mask, of_k = (t * s + 8 * (t + s)) * (not block.is_whole), k * self.kv_heads // self.heads
        here = q * self.copied  # queries, or the gradient of the output
        two = 2 * scores
        peaks = (
            here + copies + scores,
            scores + mask,
            two + here + copies,
            two + copies + q,
            two + k + max(here, of_k),
        )
        self.model.temporary(max(peaks))

    def _ring_backward(self, *saved: Buffer) -> Backward:
        def backward(gradient: Buffer, saved: Sequence[Buffer] = saved) -> tuple:
            new = self.model.new
            of_q = new(self.q)
            self.model.temporary(self.q + self.of_token * self.own)
            share = new(self.of_token * self.own)
            own, sent, came = None, None, None
            for blocks, step in self._passing():
                of_kv = new(self.kv)
                for block in blocks:
                    self._block_backward(block)
                if step == 0:
                    own = of_kv
                    continue
                sent = of_kv  # what came before is added to it
                came = new(self.kv)
            del share, sent, came
            return [of_q, own], [], None

        return backward

    def _separate(self, gradients: list[Buffer]) -> tuple:
        """Copies of the gradients of keys and of values, in the order of queries, keys and values."""
        half = self.kv // 2
        gradients[1:] = [self.model.new(half), self.model.new(half)]
        return gradients, [], None
