"""A number for each row of a batch, or for each place in its rows: equal rows have equal numbers in all runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lib.doctor.numbers.sketch import mixed
from lib.doctor.numbers.torch_insides import CannotSee


def tensors_with_rows(batch: Any) -> list[Tensor]:
    """The tensors of a batch that have as many rows as its first, out of lists and dicts.

    Raises:
        CannotSee: there is none.
    """
    found = list(_tensors(batch))
    if not found:
        raise CannotSee(
            "batch() got no tensor with rows: give it the tensors of a batch, rows along the first dimension"
        )
    return [tensor for tensor in found if len(tensor) == len(found[0])]


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor) and batch.ndim:
        yield batch
    elif isinstance(batch, Mapping):
        for key in sorted(batch, key=str):
            yield from _tensors(batch[key])
    elif isinstance(batch, list | tuple):
        for one in batch:
            yield from _tensors(one)


def hashes_of_rows(batch: Sequence[Tensor]) -> Tensor:
    """Of a batch of tensors with B rows: B numbers, from all elements of a row and their places in it."""
    found = torch.zeros(len(batch[0]) if batch else 0, dtype=torch.int64)
    for tensor in batch:
        elements = (
            _words(tensor).view(len(tensor), -1) if tensor.numel() else _words(tensor).new_zeros(len(tensor), 1)
        )
        places = mixed(torch.arange(elements.shape[1]))
        found = mixed(found * 31 + mixed(elements ^ places).sum(dim=1))
    return found


def hashes_of_places(batch: Sequence[Tensor]) -> Tensor:
    """Of tensors [B, T, …], whose rows may be cut along T: B·T numbers, from the elements at each place.

    Where in its row a place is does not count: each kind of context parallelism orders the parts differently. Empty if
    the tensors do not share B and T.
    """
    found = torch.zeros(0, dtype=torch.int64)
    if len({tensor.shape[:2] for tensor in batch}) != 1 or batch[0].ndim < 2:
        return found
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
