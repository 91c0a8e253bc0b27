"""Vocabulary-parallel embedding and loss, without full logits on any rank.

The problem: the largest matrix of a small model, and the largest activation of every model, have the vocabulary as a
dimension: 128,000 entries by 8192 tokens are 4 GB of logits in float32, too much to all-gather for a softmax.

The idea: the loss needs three numbers per token from the logits, and each is a maximum or a sum over the vocabulary, so
it can be reduced over the ranks.

    loss = log Σᵥ exp(zᵥ) − z_target        the largest logit (all-reduce max), so that exp cannot overflow;
                                            then Σ exp and the target logit (one all-reduce sum for both)

Then each rank can compute the gradient, softmax(z) − onehot(target), for its own entries: backward sends nothing.

Source: Shoeybi et al., Megatron-LM, 2019, arXiv 1909.08053, section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from lib import comm
from lib.mesh import Group
from lib.placement import Shard, split_size
from lib.tensor_parallel.linear import ParallelLayer, check_first

USUAL = {"max_norm": None, "scale_grad_by_freq": False, "sparse": False, "padding_idx": None}  # of nn.Embedding


class VocabParallelEmbedding(ParallelLayer):
    """tokens[…] → x[…, D], from weight[V/n, D]: each rank looks up its own entries, and returns 0 for all others.

    forward: one all-reduce, 2(n−1)/n · x. backward: no communication. With `sequence_dim`: x is sharded along it.
    forward: one reduce-scatter, (n−1)/n · x. backward: one all-gather, the same bytes.

    Args:
        num_embeddings, embedding_dim: of the full embedding.
        group, sequence_dim: as for `ParallelLayer`.

    Raises:
        ValueError: the vocabulary cannot be split evenly; a token that is not in it; a serial embedding that rescales
            its rows (`max_norm`) or gradients (`scale_grad_by_freq`), has sparse gradients, or has a padding token.
    """

    shards, placements = nn.Embedding, {"weight": Shard(0)}

    def __init__(
        self, num_embeddings: int, embedding_dim: int, group: Group, sequence_dim: int | None = None
    ) -> None:
        split_size(num_embeddings, group, "vocabulary")
        super().__init__(nn.Embedding(num_embeddings, embedding_dim), group, sequence_dim)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim

    @staticmethod
    def _sizes(serial: nn.Embedding) -> dict[str, int]:
        for option, value in USUAL.items():
            if getattr(serial, option) is not value:
                raise ValueError(
                    f"this embedding has {option}={getattr(serial, option)}, which shards cannot have; keep it full "
                    "on each rank, or make it without this option"
                )
        return {name: getattr(serial, name) for name in ("num_embeddings", "embedding_dim")}

    def forward(self, tokens: Tensor) -> Tensor:
        _check_words(tokens, self.num_embeddings, "token")
        words, is_mine = _mine(tokens, len(self.weight), self.group)
        return self._sum(embedding(words, self.weight).masked_fill(~is_mine.unsqueeze(-1), 0))


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, group: Group, ignore_index: int = -100) -> Tensor:
    """Cross-entropy of each token, from sharded logits: logits[…, V/n], targets[…] → loss[…], nats.

    forward: one all-reduce (max) of one number per token, one (sum) of two. backward: no communication. No rank ever
    holds the full logits.

    Args:
        targets: token numbers, equal on all ranks; `ignore_index` marks tokens that do not count: their loss is 0.

    Raises:
        ValueError: shapes that do not match, a target that is not in the vocabulary, or full logits on all ranks; the
            last two only on a CPU, because reading values on a GPU would wait for it.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"logits {list(logits.shape)} and targets {list(targets.shape)} must be […, V/n] and […]")
    counts = targets != ignore_index
    _check_words(targets.masked_fill(~counts, 0), logits.shape[-1] * group.size, "target")
    return _CrossEntropy.apply(logits, targets, counts, group)


def vocab_parallel_loss(
    logits_BTv: Tensor, targets_BT: Tensor, group: Group, count: float | Tensor | None = None, ignore_index=-100
) -> Tensor:
    """`lib.model.loss_term` from sharded logits[B, T, V/n], shape [], equal on all ranks.

    Full logits on each of n ranks would count each vocabulary entry n times: a loss that is log n too high. On a CPU
    they are refused; on a GPU give them to `lib.model.loss_term` yourself.

    `count` is the number of tokens in the mean, or the sum of their weights, on all ranks and in all microbatches.
    None: the tokens that count here.
    """
    losses = vocab_parallel_cross_entropy(logits_BTv, targets_BT, group, ignore_index)
    counted = (targets_BT != ignore_index).sum() if count is None else torch.as_tensor(count)
    return losses.sum() / torch.where(counted == 0, 1, counted)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, counts: Tensor, group: Group) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        largest = comm.all_reduce(logits.amax(-1).to(wide), group, "max")
        shifted = logits.to(wide) - largest.unsqueeze(-1)
        words, is_mine = _mine(targets, logits.shape[-1], group)
        is_mine &= counts
        of_target = shifted.gather(-1, words.unsqueeze(-1)).squeeze(-1).masked_fill(~is_mine, 0)  # 0 · inf is NaN
        powers = shifted.exp()
        own = powers.sum(-1)
        total, of_target = comm.all_reduce(torch.stack([own, of_target]), group)
        _check_shards(logits, own, total, group)
        ctx.save_for_backward(powers.div_(total.unsqueeze(-1)), words, is_mine, counts)
        ctx.dtype = logits.dtype
        return (total.log() - of_target).masked_fill(~counts, 0)  # logits of an ignored token may be NaN

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        check_first("vocab_parallel_cross_entropy", "all_gather_split of the logits, and cross_entropy of torch")
        softmax, words, is_mine, counts = ctx.saved_tensors
        target = -is_mine.to(softmax.dtype)
        of_logits = softmax.scatter_add(-1, words.unsqueeze(-1), target.unsqueeze(-1))
        of_logits.mul_(gradient.unsqueeze(-1)).masked_fill_(~counts.unsqueeze(-1), 0)
        return of_logits.to(ctx.dtype), None, None, None


def _check_words(words: Tensor, vocab_size: int, what: str) -> None:
    if words.device.type == "cpu" and words.numel():  # reading values on a GPU would wait for it
        low, high = int(words.min()), int(words.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"{what} {low if low < 0 else high} is not in a vocabulary of {vocab_size}, 0 to {vocab_size - 1}"
            )


def _check_shards(logits: Tensor, own: Tensor, total: Tensor, group: Group) -> None:
    """Raise ValueError if all ranks have given the same logits.

    Then each rank has 1/n of every sum over the vocabulary, as shards have only if all logits of a token are equal.
    """
    if group.size == 1 or logits.device.type != "cpu":
        return
    alike = torch.isclose(own * group.size, total, rtol=1e-6, atol=0).all()
    if alike and (logits.amin(-1) < logits.amax(-1)).any():
        size = logits.shape[-1]
        raise ValueError(
            f"all {group.size} ranks gave the same logits of {size} vocabulary entries, so these are no shards of "
            f"{size * group.size}: use lib.model.loss_term for full logits, or give each rank its {size}/{group.size}"
        )


def _mine(words: Tensor, size: int, group: Group) -> tuple[Tensor, Tensor]:
    """Index of each token in this rank's shard of the vocabulary (0 if it is not there), and whether it is there."""
    here = words - group.rank * size
    is_mine = (0 <= here) & (here < size)
    return here * is_mine, is_mine
