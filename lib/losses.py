"""The loss of a language model as terms of a mean, which add up over microbatches and over ranks.

The problem: a rank that divides by the tokens that it has gives them more weight where they are few. The idea: a sum
and a count; who has all counts divides.
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


def loss_sum_and_count(logits_BTV: Tensor, targets_BT: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropies in nats over tokens, and how many count: the loss is Σ sum / Σ count over ranks.

    Half precision is widened to float32 first; `ignore_index` marks targets that do not count.
    """
    if logits_BTV.shape[:-1] != targets_BT.shape:
        raise ValueError(
            f"logits {tuple(logits_BTV.shape)} and targets {tuple(targets_BT.shape)} must be [B, T, V] and [B, T]"
        )
    wide = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
    logits, targets = wide.flatten(0, -2), targets_BT.flatten()
    total = cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")
    return total, (targets != ignore_index).sum()


def loss_term(logits_BTV: Tensor, targets_BT: Tensor, count: float | Tensor, ignore_index: int = -100) -> Tensor:
    """The term of these tokens in the mean loss over `count` tokens: Σ of their cross-entropies / count, shape [].

    0 if no token counts, here or at all. Terms add up, and so do their gradients, over microbatches and over ranks.
    """
    counted = torch.as_tensor(count)  # a sum of weights may be below 1
    return loss_sum_and_count(logits_BTV, targets_BT, ignore_index)[0] / torch.where(counted == 0, 1, counted)


def mean_loss(logits_BTV: Tensor, targets_BT: Tensor, ignore_index: int = -100) -> Tensor:
    """Mean cross-entropy in nats per counted token, shape []; 0 (with zero gradients) when none is counted."""
    total, count = loss_sum_and_count(logits_BTV, targets_BT, ignore_index)
    return total / count.clamp(min=1)
