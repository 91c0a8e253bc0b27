"""Dropout that does not depend on the layout: the mask follows from seed, step, sequence, layer and position.

The problem: dropout draws from a stream of random numbers, and the position in this stream depends on the layout, so a
run on many ranks cannot be compared with one process.
The idea: no stream. Whether an element stays is a function of five numbers: the seed, the step, the sequence in the
global batch, the name of the layer, the position in the sequence. Each rank computes this function for its own
elements; a shard of the sequence, or some of the heads, are different positions. Such a generator is counter-based.

The first three are stored as the seed of torch's own generator, from which no number is drawn (`row_seed`): code that
saves and restores this seed, such as an activation checkpoint, gets the same masks again.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC'11; mixing function from Steele et al., Fast
splittable pseudorandom number generators, OOPSLA 2014 (splitmix64).
"""

import math
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softmax
from torch.nn.modules.batchnorm import _BatchNorm

from lib.documents import check_documents, positions_in, seen_keys
from lib.model import GPT, Attention, Heads

_ROWS = 2**20  # of a global batch, at most
_WORDS = 2**64
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_STEP = 0x9E3779B97F4A7C15 - _WORDS  # of the counter; as an int64


def row_seed(seed: int, step: int, first_row: int) -> int:
    """The seed for torch's generator while a rank computes sequences of a global batch, from `first_row` < 2²⁰ on."""
    if not 0 <= first_row < _ROWS:
        raise ValueError(f"row {first_row} of a batch: there may be at most {_ROWS} rows")
    return (_mixed(_mixed(torch.tensor(seed)) + step).item() & 2**63 - _ROWS) + first_row


Places = Callable[[int], Tensor]  # a number of elements along a dim on this rank → their places in the full dim


def places_of_shard(rank: int, size: int) -> Places:
    """The places of the elements in a shard, the `rank`-th of `size` equal parts."""
    return lambda n: torch.arange(n) + rank * n


def drop_by_rows(
    model: nn.Module, of_heads: tuple[int, int] = (0, 1), of_tokens: tuple[int, int] | Places = (0, 1)
) -> None:
    """Replace the dropout of a GPT, which draws from a stream, by dropout that follows from sequences and layer names.

    Args:
        of_heads, of_tokens: (number, count) of the shard of this rank: of the heads in tensor-parallel attention, and
            of the sequence between the parallel layers. Tokens that are no such shard: a function to their places.
    """
    for name, module in list(model.named_modules()):
        for child, layer in module._modules.items():
            path = f"{name}.{child}".lstrip(".").removesuffix(".dropout")
            heads, mine = layer, (0, 1)  # all of them
            if isinstance(layer, nn.Dropout):
                tokens = of_tokens if callable(of_tokens) else places_of_shard(*of_tokens)
                setattr(module, child, RowDropout(layer.p, path, tokens).train(layer.training))
            elif isinstance(module, Attention) and child == "heads" and not isinstance(layer, Heads):
                heads = next((inside for inside in layer.modules() if isinstance(inside, Heads)), None)
                mine = of_heads  # tensor parallelism wraps its shard
            if isinstance(heads, Heads) and heads.p:
                masks = RowDropout(heads.p, path, places_of_shard(*mine))
                setattr(module, child, HeadsWithMasks(heads, masks).train(heads.training))


def check_rows(model: nn.Module, pieces: int) -> None:
    """Check, before a model is sharded, that its layers treat each sequence in the same way in all layouts.

    Args:
        pieces: number of pieces of the global batch: over data-parallel ranks and microbatches.

    Raises:
        ValueError: a batch norm, or documents of rows, if the batch is split; dropout that `drop_by_rows` cannot
            replace.
    """
    finds_documents = isinstance(model, GPT) and model.finds_documents and model.config.document_end is not None
    for name, module in model.named_modules():
        said, p = f"{name} ({type(module).__name__})", getattr(module, "p", 0)
        if isinstance(module, _BatchNorm) and pieces > 1:
            raise ValueError(
                f"{said} takes its mean over all sequences, and this layout splits a batch into {pieces} pieces, each "
                "with its own mean: use LayerNorm, RMSNorm or GroupNorm, or one piece"
            )
        if isinstance(module, _DROPOUT) and p and type(module) is not nn.Dropout:
            raise ValueError(f"{said} draws from a stream, which differs between layouts: use nn.Dropout")
        if isinstance(module, Heads) and p and not _is_plain(module):
            raise ValueError(
                f"{said} has dropout, which is replaced with all that it adds to Heads of lib/model.py: use p = 0 there"
            )
        documents = module.documents if isinstance(module, Heads) and not finds_documents else None
        if pieces > 1 and documents is not None and (rows := len(documents)) > 1:
            raise ValueError(
                f"{said} has the documents of {rows} rows, and this layout splits a batch into {pieces} pieces, each "
                "with rows of its own: use document_end, or documents [1, T] for all rows, or one piece"
            )


def _is_plain(heads: Heads) -> bool:
    """Whether heads are those of `lib/model.py`, without methods or hooks of their own."""
    has_hooks = any(value for name, value in vars(heads).items() if name.endswith("_hooks"))
    return type(heads) is Heads and vars(heads).keys().isdisjoint(vars(Heads)) and not has_hooks


def set_on(heads: Heads) -> dict[str, Any]:
    """What heads were made with, and what was set on them since, such as positions: for heads that replace them."""
    return {name: value for name, value in vars(heads).items() if not name.startswith("_")}


class RowDropout(nn.Module):
    """Dropout of x[b, …] with probability p, with a mask for each sequence.

    Args:
        name: of the layer, in the serial model.
        places: where the elements along the second dim of x are in the full tensor: tokens, or heads. By default x has
            all of them.
    """

    def __init__(self, p: float, name: str, places: Places = torch.arange) -> None:
        super().__init__()
        self.p, self.layer, self.places = p, zlib.crc32(name.encode()), places

    def forward(self, x: Tensor, *further: tuple[range, int], seed: int | None = None) -> Tensor:
        """x[b, …] → [b, …].

        Args:
            further: for each dim after the second, the places of its elements, and the full size of the dim. Default:
                x has all of them.
            seed: that of torch's generator when the rows were begun. Default: its seed now.
        """
        if not self.training or not self.p:
            return x
        seed = torch.initial_seed() if seed is None else seed
        return x * self._stays(x, further, seed).to(x.dtype).div_(1 - self.p)

    def _stays(self, x: Tensor, further: tuple[tuple[range, int], ...], seed: int) -> Tensor:
        """The elements that stay: True, in a tensor of the shape of x."""
        shape, device = x.shape, x.device
        rows = seed % 2**63 + torch.arange(shape[0], device=device)
        keys = _mixed(_mixed(rows) + self.layer)
        places = self.places(shape[1]).to(device)
        for here, size in further or [(range(n), n) for n in shape[2:]]:
            places = places[..., None] * size + positions_in(here, device)
        bits = _mixed(places * _STEP + keys.view(-1, *[1] * places.dim()))
        return bits >= int((self.p - 0.5) * _WORDS)


class HeadsWithMasks(Heads):
    """The heads that it replaces, but `dropout` drops scores[b, H, T, T]; without a fused kernel."""

    def __init__(self, heads: Heads, dropout: RowDropout) -> None:
        super().__init__(heads.widths, heads.d_head)
        vars(self).update(set_on(heads), p=0.0)  # its dropout is a layer
        for name, layer in (*heads.named_children(), ("dropout", dropout)):
            setattr(self, name, layer)

    def attention(self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor) -> Tensor:
        every = range(q_BHTE.shape[2])
        return self.attend(q_BHTE, k_BKTE, v_BKTE, every, every, len(every))

    def attend(
        self, q_BHtE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, queries: range, keys: range, length: int
    ) -> Tensor:
        """Attention of queries to keys at these positions of a sequence of `length` tokens. → y[B, H, t, E]."""
        serves = q_BHtE.shape[1] // k_BKSE.shape[1]
        k_BHSE, v_BHSE = (x.repeat_interleave(serves, dim=1) for x in (k_BKSE, v_BKSE))
        scores_BHtS = q_BHtE @ k_BHSE.transpose(2, 3) / math.sqrt(self.d_head)
        check_documents(self.documents, len(q_BHtE), length)
        seen = seen_keys(queries, keys, self.documents, q_BHtE.device)
        weights_BHtS = softmax(scores_BHtS.masked_fill(~seen, -math.inf), dim=-1)
        return self.drops(length)(weights_BHtS, queries, keys) @ v_BHSE

    def drops(self, length: int) -> Callable[[Tensor, range, range], Tensor]:
        """Dropout of the present rows, now or later: a function of weights[B, H, t, S], queries and keys."""
        seed = torch.initial_seed()
        return lambda weights, queries, keys: self.dropout(weights, (queries, length), (keys, length), seed=seed)


def _mixed(z: Tensor) -> Tensor:
    """A hash of int64, which takes near integers far apart. It wraps around; a shift copies the sign: masked."""
    z = z + _STEP
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> shift & (1 << 64 - shift) - 1)) * (factor - _WORDS)
    return z ^ (z >> 31 & (1 << 33) - 1)
