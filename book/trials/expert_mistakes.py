"""Classic mistakes of expert parallelism, planted on purpose. None of them raises an error.

Gradients of experts that are ep times too large change the weights of SGD and the norm that clips; Adam without a clip
divides the factor out. Every further mistake changes the weights of both.

    with planted("experts' gradients ep times too large", EXPERT_MISTAKES):
        certify(world, layouts, model, batches, max_norm=0.1)

Where they were met: pytorch 160285, Megatron-LM 5656 and 5956, DeepSpeed 5259 (gradients of experts); arXiv 2501.11873
(balance); transformers 48205 and 48687, Automodel 1412 and 2995 (router); MegaBlocks 86 (sums over all ranks).
"""

from __future__ import annotations

from torch import Tensor

from lib import parallel
from lib.conjugate import all_reduce_identity, identity_all_reduce, rows_to_ranks
from lib.expert_parallel.dispatch import Dispatch
from lib.expert_parallel.layer import ExpertGroups, ParallelMoE
from lib.facts import Fact
from lib.layout import TOKEN_AXES
from lib.mesh import Mesh
from lib.moe import MoE
from lib.parallel_model import ParallelModel

_FACTS, _CLIP, _INIT, _MIXTURE = parallel.facts_of, ParallelModel.clip, ParallelMoE.__init__, ParallelMoE.mixture


def _ep_times_too_large(model: ParallelModel, max_norm: float) -> Tensor:
    """A rank divides its loss by its own tokens, and the holders of an expert average, as the others do."""
    for fact, held, _ in model.pieces():
        if held.grad is not None:
            held.grad *= fact.experts_over.size
    return _CLIP(model, max_norm)


def _balanced_alone(moe: ParallelMoE, scores_BTE: Tensor, load_BE: Tensor) -> Tensor:
    """The mean of the losses of the ranks."""
    return MoE.balance_loss(moe, scores_BTE, load_BE) / moe.groups.tokens.size


def _detached(moe: ParallelMoE, x_BTD: Tensor, chosen_BTk: Tensor, gates_BTk: Tensor) -> Tensor:
    return _MIXTURE(moe, x_BTD, chosen_BTk, gates_BTk.detach())


def _own_slice_of_gates(moe: ParallelMoE, x_BTD: Tensor, chosen_BTk: Tensor, gates_BTk: Tensor) -> Tensor:
    """Each tensor-parallel rank has the gradient of the weights from its slice of the experts' outputs alone."""
    tp = moe.groups.tp
    return all_reduce_identity(MoE.mixture(moe, identity_all_reduce(x_BTD, tp), chosen_BTk, gates_BTk), tp)


def _all_is_partial(moe: ParallelMoE, serial: MoE, groups: ExpertGroups) -> None:
    """A sum over tp then makes the gradient of the outputs right, and that of the balance loss tp times too large."""
    _INIT(moe, serial, groups)
    moe.router.partial_gradients = ("weight",)


def _as_they_arrived(dispatch: Dispatch, rows_RD: Tensor) -> Tensor:
    """The sender gets its rows in the order of experts over all senders."""
    back = [list(column) for column in zip(*dispatch.rows, strict=True)]
    return rows_to_ranks(rows_RD, back, dispatch.group)


def _summed_over_all(stages: object, mesh: Mesh, *more: object) -> list[Fact]:
    """Ranks with different experts add their gradients."""
    facts = _FACTS(stages, mesh, *more)
    for fact in facts:
        if fact.experts_over.size > 1:
            object.__setattr__(fact, "sum_over", mesh.group_of_some(*TOKEN_AXES))
    return facts


def _room_of_a_rank(moe: ParallelMoE, load_E: Tensor, tokens: int) -> Tensor:
    return MoE.room(moe, load_E, tokens)


# Description of a mistake → the object to patch, the name of its attribute, the replacement.
EXPERT_MISTAKES: dict[str, list[tuple]] = {
    "experts' gradients ep times too large": [(ParallelModel, "clip", _ep_times_too_large)],
    "loads balanced on each rank alone": [
        (ParallelMoE, "over_ranks", lambda moe, load: load),
        (ParallelMoE, "balance_loss", _balanced_alone),
    ],
    "weights of outputs detached": [(ParallelMoE, "mixture", _detached)],
    "router's gradient not summed over tp": [(ParallelMoE, "mixture", _own_slice_of_gates)],
    "balance gradient summed over tp": [
        (ParallelMoE, "mixture", _own_slice_of_gates),
        (ParallelMoE, "__init__", _all_is_partial),
    ],
    "capacity of a rank for that of the group": [(ParallelMoE, "room", _room_of_a_rank)],
    "rows home in the order of arrival": [(Dispatch, "home", _as_they_arrived)],
    "experts' gradients summed over all ranks": [(parallel, "facts_of", _summed_over_all)],
}
