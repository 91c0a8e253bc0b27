"""Is a layout the same training as one process? Losses, gradients and weights, tensor by tensor, after some steps.

The problem: after a mistake between two axes a run still trains, only worse, and a test of each axis alone does not
find it. The idea: the twin, the GPT of `lib/model.py`, takes the same steps on every rank, with torch's own AdamW and
clipping; then each rank compares its shards of gradients and weights with the same shards of the twin. One start of
processes serves many layouts.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lib import comm, data
from lib.data_parallel.flat import MakeOptimizer
from lib.lab.first_difference import EXACT, OF_WEIGHTS, first_difference
from lib.lab.twin import ADAMW, Batch, TwinStep, beside, mean_over_tokens, twin_steps
from lib.launch import device
from lib.layout import Layout
from lib.mesh import Group, Mesh, MeshShape
from lib.model import GPT
from lib.parallel import parallelize
from lib.parallel_model import BatchLoss, ParallelModel
from lib.placement import Replicate, with_partial_gradients
from lib.training.config import TrainConfig
from lib.training.learning_rate import set_learning_rate
from lib.training.loop import adamw

SEARCHED_STEPS = 1000  # for a document that ends


class _Distances(NamedTuple):
    loss: float
    gradient: float
    weight: float


class Apart(_Distances):
    """How far a layout is from one process: the largest ‖ours − theirs‖/‖theirs‖ over steps, tensors and ranks.

    Attributes:
        loss, gradient, weight: the distance of the losses; of the clipped gradients, and of their norm before, because
            the clip hides a factor of all; and of the weights after a step.
        difference: if it does not hold: where a step first differs, and in which pattern, in words.
    """

    difference = ""

    def holds(self) -> bool:
        """Whether it is the same training, to float64's rounding."""
        return self.loss < EXACT and self.gradient < EXACT and self.weight < OF_WEIGHTS


def certify(
    world: Group,
    layouts: Sequence[Layout],
    model: nn.Module,
    batches: Sequence[Batch],
    max_norm: float,
    optimizer: MakeOptimizer = ADAMW,
    before_step: Callable[[Optimizer, int], None] = lambda *_: None,
    *,
    make: Callable[[nn.Module, Mesh, Layout, MakeOptimizer], ParallelModel] = parallelize,
    loss: BatchLoss = mean_over_tokens,
) -> list[Apart]:
    """For each layout on these ranks, its distance from one process after a step on each batch; equal on all ranks.

    One that does not hold takes the steps once more, watched, to say where it first differs.

    Args:
        model: in float64, equal on all ranks; it is not changed. Every rank trains a full copy: give a small model
            with the same layers.
        batches: inputs and targets [B, …], a step each; targets of -100 do not count in the loss of a GPT.
        max_norm: to which gradients are clipped.
        optimizer: of the layout and of one process.
        before_step: called with an optimizer and the number of its next step, such as to set its learning rate.
        make: parallelizes a copy of the model; for your own, a function that calls `assemble`.
        loss: of one process, from its output and all targets, in the form that `assemble` takes.

    Raises:
        ValueError: a layout with a different number of ranks, or in which full experts drop other tokens; a parameter
            that works on shards, and whose module does not say so in `partial_gradients`.

    Example:
        from lib.lab.certificate import certify

        # loss, layout and all imports: of the example of assemble()
        torch.manual_seed(0)  # equal weights on all ranks
        batch = torch.ones(8, 4).double(), torch.zeros(8, 1).double()
        make = partial(assemble, loss=loss)
        apart = certify(world, [layout], nn.Linear(4, 1).double(), [batch], max_norm=1.0, make=make, loss=loss)
        assert apart[0].holds()
    """
    model = copy.deepcopy(model).to(device())
    batches = [(x.to(device()), y.to(device())) for x, y in batches]
    steps = list(twin_steps(copy.deepcopy(model), batches, max_norm, optimizer, before_step, loss))
    meshes: dict[str, Mesh] = {}  # a mesh serves all layouts of its shape
    distances = []
    for layout in layouts:
        if isinstance(model, GPT):
            layout.check_capacity(model.config)
        if (shape := str(layout.sizes)) not in meshes:
            meshes[shape] = Mesh(MeshShape(**layout.sizes), world)
        mesh = meshes[shape]
        apart = _certified(make(copy.deepcopy(model), mesh, layout, optimizer), batches, max_norm, steps, before_step)
        if not apart.holds():
            again, weights = make(copy.deepcopy(model), mesh, layout, optimizer), dict(model.named_parameters())
            apart.difference = first_difference(again, batches, max_norm, weights, steps, before_step)
        distances.append(apart)
    return distances


def certify_run(world: Group, config: TrainConfig, steps: int = 3) -> Apart:
    """How far a run is from one process in its first steps, in float64: layout, model, text, clipping and AdamW.

    The learning rate follows the schedule of the run, with 1e-2 instead of `config.lr` as its highest: a rate at which
    rounding grows would say nothing about the layout.
    """
    batches = batches_to_certify(config, steps)
    torch.manual_seed(config.seed)
    model = GPT(config.model).double()
    optimizer, rate = adamw(config, ADAMW.keywords["lr"]), partial(set_learning_rate, config=config)
    return certify(world, [config.layout], model, batches, config.max_norm, optimizer, rate)[0]


def batches_to_certify(config: TrainConfig, steps: int = 3) -> list[Batch]:
    """The first batches of a run; where documents are kept apart, the first in which a sequence has two of them.

    Raises:
        ValueError: there is none, and any layout would be equal.
    """
    tokens, end = config.corpus.load().train, config.model.document_end
    sizes = {"global_batch": config.global_batch, "context": config.model.context, "seed": config.seed}
    every = (data.batch(tokens, step, **sizes) for step in range(steps if end is None else SEARCHED_STEPS))
    if end is not None:
        every = ((inputs, targets) for inputs, targets in every if (inputs[:, :-1] == end).any())
    if not (found := list(islice(every, steps))):
        raise ValueError(
            f"document_end={end} is inside no sequence of the first {SEARCHED_STEPS:,} steps, so that nothing can be "
            "seen of documents that are kept apart: use a token of this text, or leave it out"
        )
    return found


def _certified(
    ours: ParallelModel,
    batches: Sequence[Batch],
    max_norm: float,
    steps: list[TwinStep],
    before_step: Callable[[Optimizer, int], None],
) -> Apart:
    worst = torch.zeros(3, dtype=torch.float64, device=device())
    gradients: list[Tensor] = []  # their distances, measured as the optimizer steps: shards have gradients then

    def measure(*_) -> None:
        if not gradients:  # later, replicas that drifted have wrong gradients everywhere
            _check_replicas(ours, steps[0].gradients)
        gradients.append(_farthest(ours, steps[len(gradients)].gradients, lambda p: p.grad))

    ours.optimizer.register_step_pre_hook(measure)
    for number, ((inputs, targets), wanted) in enumerate(zip(batches, steps, strict=True)):
        before_step(ours.optimizer, number)
        loss = ours.step(inputs, targets, max_norm, number)
        weights = _farthest(ours, wanted.weights, lambda p: p.detach())
        of_norm = (ours.norm - wanted.norm).abs() / wanted.norm
        apart = torch.stack([(loss - wanted.loss).abs() / wanted.loss, max(gradients[number], of_norm), weights])
        worst = torch.maximum(worst, apart.nan_to_num(nan=math.inf, posinf=math.inf))
    return Apart(*comm.all_reduce(worst, ours.mesh.world, "max").tolist())


def _farthest(ours: ParallelModel, wanted: dict[str, Tensor], of: Callable[[nn.Parameter], Tensor]) -> Tensor:
    """The largest distance of a shard here from the same shard of the twin, as a fraction of the full tensor's norm."""
    distances = [torch.zeros((), dtype=torch.float64, device=device())]
    distances += [(piece.mine - piece.right).norm() / piece.size for piece in beside(ours, wanted, of)]
    return torch.stack(distances).max()


def _check_replicas(ours: ParallelModel, wanted: dict[str, Tensor]) -> None:
    """Raise ValueError, on all ranks, if a parameter that each tensor-parallel rank holds in full gets terms of a sum.

    It is between a column layer and its row layer, such as the weight of QK-norm: there each rank computes the gradient
    of its heads alone. Then the gradients of the ranks differ, and their sum is that of one process, except for a
    factor, because the norm that clips is wrong as well.
    """
    if ours.tp.size == 1:
        return
    marked = set().union(*(with_partial_gradients(stage.module) for stage in ours.stages.values()))
    least = torch.stack([whole.norm() for whole in wanted.values()]).norm() / 1000  # below, a gradient is rounding
    unsummed = []
    for fact, held, span in ours.pieces():
        is_whole = isinstance(fact.placement, Replicate) and id(fact.parameter) not in marked
        if not is_whole or not fact.parameter.requires_grad:
            continue
        mine, right = held.grad.flatten(), wanted[fact.name].flatten()[span]
        total = comm.all_reduce(mine, ours.tp)
        differs = (mine - total / ours.tp.size).norm() > 1e-6 * total.norm().clamp(min=least)
        if differs and (total * (right.norm() / total.norm()) - right).norm() < 1e-6 * right.norm():
            unsummed.append(fact.name)
    if found := [name for names in comm.all_gather_object(unsummed, ours.mesh.world) for name in names]:
        raise ValueError(
            f"{found[0]} is full on all {ours.tp.size} tensor-parallel ranks, but each computes only a term of its "
            "gradient, from a shard, and nothing sums them, so the copies would drift apart: let shard= set "
            f"partial_gradients = ({found[0].rpartition('.')[2]!r},) on its module"
        )
