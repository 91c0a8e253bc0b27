"""Which tokens of a sequence each context-parallel rank takes, and how much causal attention they make.

The problem: a causal query attends to the keys before it. If the ranks take consecutive tokens, the last rank has
almost twice the mean work, and the first almost none.
The idea: an order in which each rank has early and late tokens. A rank's tokens are one range, or two; a block of
attention is a range of queries and a range of keys, and needs no computation if all keys come later.

    contiguous    0 0 1 1 2 2 3 3      one range each; the last rank computes almost 2 − 1/n times the mean
    zigzag        0 1 2 3 3 2 1 0      2n chunks, rank r has r and 2n − 1 − r: equal, exactly
    striped       0 1 2 3 0 1 2 3      every n-th token: equal but for the diagonal

Letters: T tokens of a sequence, n ranks.

Source: zig-zag in Llama Team, 2024, arXiv 2407.21783, section 3.3.2; striped in Brandon et al., 2023, arXiv 2311.09431.
"""

from __future__ import annotations

from typing import NamedTuple

TOKEN_ORDERS = ("contiguous", "zigzag", "striped")


def check_length(order: str, length: int, n: int, said: str = "") -> None:
    """Raise ValueError if n ranks cannot take equal parts of a sequence in this order; its length is `said`."""
    if order not in TOKEN_ORDERS:
        raise ValueError(f"token_order={order!r} must be one of {', '.join(TOKEN_ORDERS)}")
    parts = 2 * n if order == "zigzag" else n
    if length % parts:
        chunks = f"2 x cp={n} chunks" if order == "zigzag" else f"cp={n}"
        fits = f"use a multiple of {parts}, such as {-(-length // parts) * parts}"
        raise ValueError(f"{said or f'context={length}'} cannot be split over {chunks} ({order}); {fits}")


def tokens_of_rank(order: str, length: int, n: int, rank: int) -> list[range]:
    """The positions of the tokens of a rank, in the order in which it holds them: one range, or two for zigzag.

    Example: `tokens_of_rank("zigzag", 16, 4, 1)` is `[range(2, 4), range(12, 14)]`.

    Raises:
        ValueError: the tokens cannot be split evenly.
    """
    check_length(order, length, n, f"{length} tokens")
    if order == "striped":
        return [range(rank, length, n)]
    if order == "contiguous":
        size = length // n
        return [range(rank * size, (rank + 1) * size)]
    size = length // (2 * n)
    return [range(i * size, (i + 1) * size) for i in (rank, 2 * n - 1 - rank)]


class AttentionBlock(NamedTuple):
    """A block of attention: some queries of one rank, and some keys of one rank; at least one key is earlier.

    Args:
        queries, keys: their positions in the sequence.
        mine, theirs: where the two ranks hold them.
    """

    queries: range
    keys: range
    mine: slice
    theirs: slice

    @property
    def is_whole(self) -> bool:
        """Whether every query sees every key, so that no mask is needed."""
        return self.keys[-1] <= self.queries[0]


def blocks_of(order: str, length: int, n: int, rank: int, owner: int) -> list[AttentionBlock]:
    """The blocks that a rank computes with the keys of their owner; a block whose keys all come later is none."""
    blocks, at = [], 0
    for queries in tokens_of_rank(order, length, n, rank):
        mine, at, begin = slice(at, at + len(queries)), at + len(queries), 0
        for keys in tokens_of_rank(order, length, n, owner):
            theirs, begin = slice(begin, begin + len(keys)), begin + len(keys)
            if keys and keys[0] <= queries[-1]:
                blocks.append(AttentionBlock(queries, keys, mine, theirs))
    return blocks


def causal_pairs(order: str, length: int, n: int, rank: int, documents: tuple[int, ...] = ()) -> int:
    """How many pairs of a query and a key a rank computes in a sequence with a causal mask.

    Args:
        documents: lengths of the documents of a sequence, if a query attends to one alone. Default: it is one document.
    """
    if documents and sum(documents) != length:
        raise ValueError(f"documents={documents} have {sum(documents)} tokens, and the sequence has {length}")
    pairs, start = 0, 0
    for size in documents or (length,):
        for tokens in tokens_of_rank(order, length, n, rank):
            pairs += sum(query - start + 1 for query in tokens if start <= query < start + size)
        start += size
    return pairs
