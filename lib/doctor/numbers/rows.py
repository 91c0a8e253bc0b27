"""A number for each row of a batch, or for each place in its rows: equal rows have equal numbers in all runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lib.doctor.numbers.sketch import mixed


def hashes_of_rows(batch: Sequence[Tensor]) -> Tensor:
    """Of a batch of tensors with B rows: B numbers, from all elements of a row and their places in it."""
    found = torch.zeros(len(batch[0]) if batch else 0, dtype=torch.int64)
    for tensor in batch:
        elements = _words(tensor).reshape(len(tensor), -1)
        places = mixed(torch.arange(elements.shape[1]))
        found = mixed(found * 31 + mixed(elements ^ places).sum(dim=1))
    return found


def hashes_of_positions(batch: Sequence[Tensor]) -> Tensor:
    """Of tensors [B, T, …] whose rows are cut along T: B·T numbers, from the elements at each place.

    Where in its row a place is does not count: each kind of context parallelism orders the parts differently.
    """
    found = torch.zeros(0, dtype=torch.int64)
    for tensor in batch:
        words = _words(tensor)
        each = mixed(words.reshape(*words.shape[:2], -1)).sum(dim=-1).flatten()
        found = mixed((found if len(found) else torch.zeros_like(each)) * 31 + each)
    return found


def _words(tensor: Tensor) -> Tensor:
    """Elements as integers, whatever their type: a row counts as equal if its values are."""
    if tensor.is_floating_point():
        wide = tensor.double()
        return (wide + 0.0).view(torch.int64) ^ ((wide + 0.0).view(torch.int64) >> 32)
    return tensor.to(torch.int64)
