"""Classic mistakes between two axes, planted on purpose: does the certificate find them?

Each of these trains. The loss falls, and no error is raised. They are in the usual places: the ranks that a gradient is
summed over, the count that a loss is divided by, the seed of dropout.

    with planted("norms not summed over tp"):
        certify(world, layouts, model, batches, max_norm=0.1)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from unittest.mock import patch

from torch import Tensor

from lib import comm, data, parallel, parallel_model
from lib.facts import Fact
from lib.mesh import Mesh
from lib.parallel_model import ParallelModel

_FACTS, _CLIP, _TERM, _SEED = parallel.facts_of, ParallelModel.clip, ParallelModel.term_of, parallel_model.row_seed


class _Alone(Fact):
    held_by = 1  # as if no other rank had it


def _counted_again(fact: Fact, mesh: Mesh) -> Fact:
    return _Alone(*(getattr(fact, one.name) for one in fields(fact)))


def _slices_left_out(fact: Fact, mesh: Mesh) -> Fact:
    slices = mesh.shape.sizes["tp"] > 1 and "tp" in fact.sum_over.axis.split("×")
    return replace(fact, sum_over=mesh.group("dp")) if slices else fact


def _along_the_wrong_axis(fact: Fact, mesh: Mesh) -> Fact:
    return replace(fact, sum_over=mesh.group("tp")) if fact.sum_over == mesh.group("dp") else fact


def _of_one_end(fact: Fact, mesh: Mesh) -> Fact:
    return replace(fact, sum_over=mesh.group("dp")) if fact.crosses else fact


def _in_facts(wrong: Callable[[Fact, Mesh], Fact]) -> tuple:
    return parallel, "facts_of", lambda stages, mesh, *rest: [wrong(f, mesh) for f in _FACTS(stages, mesh, *rest)]


def _halves_added_late(model: ParallelModel, max_norm: float) -> Tensor:
    norm = _CLIP(model, max_norm)
    for fact in model.facts:
        if fact.crosses:
            fact.parameter.grad.copy_(comm.all_reduce(fact.parameter.grad, model.pp))
    return norm


def _mean_of_local_means(model: ParallelModel, targets_BT: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    mine = targets_BT[data.rows_of_rank(len(targets_BT), model.dp.rank, model.dp.size)]
    return _TERM(model, mine.repeat(model.dp.size, 1))  # as if each rank had the target count of this rank


# Description of a mistake → the object to patch, the name of its attribute, the replacement.
MISTAKES: dict[str, list[tuple]] = {
    "clip counts copies": [_in_facts(_counted_again)],
    "loss divided by the local count": [(ParallelModel, "term_of", _mean_of_local_means)],
    "norms not summed over tp": [_in_facts(_slices_left_out)],
    "tied halves added after the clip": [_in_facts(_of_one_end), (ParallelModel, "clip", _halves_added_late)],
    "dp group along the wrong axis": [_in_facts(_along_the_wrong_axis)],
    "dropout equal over dp": [(parallel_model, "row_seed", lambda seed, step, first_row: _SEED(seed, step, 0))],
}


@contextmanager
def planted(mistake: str, among: dict[str, list[tuple]] = MISTAKES) -> Iterator[None]:
    """Inside this context, a model that this rank parallelises has one of the mistakes."""
    with ExitStack() as stack:
        for where, name, instead in among[mistake]:
            stack.enter_context(patch.object(where, name, instead))
        yield
