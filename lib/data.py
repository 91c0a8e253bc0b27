"""A text, as tokens, in batches that do not depend on the layout.

The problem: to compare one process with four, both must train on the same tokens in the same step. A loader with a
random stream for each rank (seed + rank) trains on different data as soon as the number of ranks changes.
The idea: the *global* batch of a step is a pure function of (seed, step), and a rank takes its sequences of it. No rank
sends data; every rank can compute every sequence.

Shapes: N tokens (bytes) of a text, that of `lib/text.py` or your own; B sequences of a batch; T tokens of a sequence.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lib.text import TEXT


@dataclass(frozen=True)
class Corpus:
    """A text split in two: `train`, uint8[N], and `validation`, uint8[N'], never used for training.

    If a token is a character, token i is `alphabet[i]`, and both are int32; otherwise `alphabet` is "".
    """

    train: Tensor
    validation: Tensor
    alphabet: str = ""

    @property
    def num_tokens(self) -> int:
        """Number of different tokens: 256 bytes, or the characters of the text."""
        return len(self.alphabet) or 256

    def decode(self, tokens: Sequence[int]) -> str:
        """Tokens to text."""
        if self.alphabet:
            return "".join(self.alphabet[token] for token in tokens)
        return decode(torch.tensor(tokens, dtype=torch.uint8))


def load(text: bytes | None = None, validation_fraction: float = 0.1, by_character: bool = False) -> Corpus:
    """The text as tokens, its end (the last tenth) kept for validation.

    Without `text` it is the stories of `lib/text.py`.

    Args:
        by_character: a token is a character of a text in UTF-8, and no byte.

    Raises:
        ValueError: the fraction is not between 0 and 1, or leaves a part with less than two tokens; or (a
            UnicodeDecodeError) characters of a text that is not UTF-8.
    """
    if not 0 < validation_fraction < 1:
        raise ValueError(f"validation_fraction={validation_fraction} must be between 0 and 1, such as 0.1")
    raw = TEXT if text is None else text
    tokens_N, alphabet = encode_characters(raw.decode()) if by_character else (encode(raw), "")
    cut = len(tokens_N) - int(len(tokens_N) * validation_fraction)
    train, validation = tokens_N[:cut], tokens_N[cut:]
    if min(len(train), len(validation)) < 2:
        kind = "characters" if by_character else "bytes"
        raise ValueError(f"a text of {len(tokens_N)} {kind} is too short to be split in two; give more text")
    return Corpus(train, validation, alphabet)


def encode(text: bytes | str) -> Tensor:
    """Text to tokens, uint8[N]: its bytes."""
    raw = bytearray(text.encode() if isinstance(text, str) else text)
    return torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


def encode_characters(text: str) -> tuple[Tensor, str]:
    """Text to tokens, int32[N], and its alphabet: its different characters, of which token i is number i, sorted."""
    if not text:
        return torch.empty(0, dtype=torch.int32), ""
    points_N = torch.frombuffer(bytearray(text.encode("utf-32-le")), dtype=torch.int32)
    points, tokens_N = points_N.unique(return_inverse=True)
    return tokens_N.int(), "".join(map(chr, points.tolist()))


def decode(tokens_N: Tensor) -> str:
    """Tokens, [N] of any integer type, to text; bytes that are not UTF-8 become �."""
    return bytes(tokens_N.tolist()).decode("utf-8", errors="replace")


def batch(tokens_N: Tensor, step: int, *, global_batch: int, context: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The global batch of one step: inputs[B, T] and targets[B, T], the same text one token later.

    Sequence i starts at a random place that depends only on (seed, step, i), so a larger global batch begins with the
    sequences of a smaller batch. Both are int64, on the CPU.

    Args:
        tokens_N: the text, uint8[N].
        global_batch, context: sequences over all ranks, B; tokens of a sequence, T.

    Raises:
        ValueError: a size below 1, or a text shorter than context + 1.
    """
    if global_batch < 1 or context < 1:
        raise ValueError(f"global_batch={global_batch} and context={context} must be 1 or more")
    num_starts = len(tokens_N) - context
    numbers = random.Random(f"seed {seed} step {step}")  # seeded by a string: hashed, the same on every machine
    return _rows(tokens_N, [int(numbers.random() * num_starts) for _ in range(global_batch)], context)


def windows(tokens_N: Tensor, context: int, limit: int | None = None) -> tuple[Tensor, Tensor]:
    """A text, uint8[N], in non-overlapping sequences, to measure a validation loss: inputs and targets, int64[B, T].

    With `limit` at most so many sequences, evenly spread over the text.

    Raises:
        ValueError: a text shorter than context + 1, or a size below 1.
    """
    if context < 1 or (limit is not None and limit < 1):
        raise ValueError(f"context={context} and limit={limit} must be 1 or more")
    available = (len(tokens_N) - 1) // context
    count = available if limit is None else min(limit, available)
    return _rows(tokens_N, [i * available // count * context for i in range(count)], context)


def _rows(tokens_N: Tensor, starts: list[int], context: int) -> tuple[Tensor, Tensor]:
    if len(tokens_N) <= context:
        raise ValueError(
            f"a text of {len(tokens_N)} tokens is too short for context={context}; use a shorter context"
        )
    places = torch.tensor(starts)[:, None] + torch.arange(context + 1)
    rows = tokens_N[places].long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def rows_of_rank(global_batch: int, rank: int, size: int, shares: Sequence[int] | None = None) -> slice:
    """The sequences of the global batch that one data-parallel rank trains on, as a slice: ranks in order, no overlap.

    Example: `inputs[rows_of_rank(8, rank=1, size=4)]` is `inputs[2:4]`.

    Args:
        global_batch: sequences over all ranks.
        rank, size: place in, and number of, the dp ranks.
        shares: sequences of each rank, if they are not equal (`[3, 1]`); a rank may have 0.

    Raises:
        ValueError: the sequences do not divide evenly and no shares are given, or the shares do not add up.
    """
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"rank={rank} is not one of the dp={size} ranks 0 … {size - 1}")
    if shares is None:
        if global_batch < 1 or global_batch % size:
            base, rest = divmod(max(global_batch, 0), size)
            uneven = [base + (r < rest) for r in range(size)]
            raise ValueError(
                f"global_batch={global_batch} cannot be split over dp={size}; use a multiple of {size}, such as "
                f"{(base + 1) * size}, or give uneven shares={uneven}"
            )
        shares = [global_batch // size] * size
    if len(shares) != size or sum(shares) != global_batch or min(shares) < 0:
        right = f"dp={size} numbers, none negative, that add up to global_batch={global_batch}"
        raise ValueError(f"shares={list(shares)} must be {right}")
    start = sum(shares[:rank])
    return slice(start, start + shares[rank])


def unigram_entropy(tokens_N: Tensor) -> float:
    """Entropy of token frequencies, −Σ p·ln p, in nats per token.

    No model that ignores the order of the tokens can have a smaller loss on this text: a validation loss below the
    entropy of the validation text shows that context was learned.

    Raises:
        ValueError: an empty text.

    Source: Shannon 1951, F_1 of section 2.
    """
    if len(tokens_N) == 0:
        raise ValueError("an empty text has no entropy; give at least one token")
    counts = torch.bincount(tokens_N.long()).tolist()
    return -sum(c / len(tokens_N) * math.log(c / len(tokens_N)) for c in counts if c)
