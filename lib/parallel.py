"""The one place that knows all axes: a mesh and a model in, parts that fit together out.

The problem: matrices are cut over tp, layers over pp, rows over dp, and optimizer state over dp as well. Which
ranks a gradient must be summed over depends on all of these cuts: a norm between two pairs of matrices sees a slice
of the sequence, an embedding may have a second use on another stage.
The idea: no technique has to know the others. The model is cut by one technique after the other, and each leaves the
serial names. Then every parameter's two facts follow from the mesh (`facts_of`), and the rest is parts put together:

    tensor_parallel(model, mesh.group("tp"))                    each rank has parts of the matrices
    stages = stages_of(model, schedule, mesh.group("pp").rank)  … of some of the layers
    facts = facts_of(stages, mesh, schedule.rank_of)
    sums = Gradients(facts)                                     … whose gradients are sums over these ranks
    optimizer = ShardedOptimizer(sums, adamw)

Any part that is missing is an axis of one rank. `ParallelGPT` is this, with a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from lib import comm, data, trace
from lib.data_parallel.bucketed_gradients import BUCKET_BYTES, Gradients
from lib.data_parallel.ddp import replicas
from lib.data_parallel.flat import Flat, MakeOptimizer
from lib.data_parallel.fsdp import FSDP
from lib.data_parallel.optimizer import ShardedOptimizer
from lib.data_parallel.saving import of_shape
from lib.data_parallel.zero import sharded_gradients
from lib.facts import Fact
from lib.launch import device
from lib.memory import MemoryTracker
from lib.mesh import Group, Mesh
from lib.model import GPT
from lib.pipeline.execute import execute
from lib.pipeline.lower import lower
from lib.pipeline.schedules.action import Op, Schedule
from lib.pipeline.schedules.with_reduce import with_reduce
from lib.pipeline.stage import GPTStage, Stage, stages_of
from lib.placement import parts, shard, unshard
from lib.tensor_parallel.gpt import tensor_parallel
from lib.tensor_parallel.vocab import vocab_parallel_loss


def facts_of(
    stages: nn.Module | Mapping[int, Stage],
    mesh: Mesh,
    rank_of: Sequence[int] = (0,),
    norm_over: Group | None = None,
) -> list[Fact]:
    """The two facts of each parameter on this rank. All ranks must call it: it may make groups.

    A gradient is a sum over the data-parallel ranks; over the tensor-parallel ones, too, where a module says that its
    gradients are partial; and for a weight that the first and the last stage share, over the ranks of both.

    Args:
        stages: this rank's, by number, or a model that is not cut into stages.
        mesh: with any of the axes dp, pp and tp.
        rank_of: the pipeline's rank of each stage.
        norm_over: the ranks over which a gradient's norm will be summed. Default: all. Where sums end whole on every
            data-parallel rank, those of one replica are enough: `mesh.group("pp", "tp")`.
    """
    counted = (norm_over or mesh.world).ranks
    pieces = {0: stages} if isinstance(stages, nn.Module) else {s: stage.module for s, stage in stages.items()}
    rows = ["dp"] if "dp" in mesh.shape.axes else []
    cut = ["tp"] if "tp" in mesh.shape.axes else []
    tp, over, over_slices = (_group(mesh, axes) for axes in (cut, rows, rows + cut))
    shared = next((piece.shared for piece in pieces.values() if isinstance(piece, GPTStage)), {})
    over_users = {  # of parameters that several stages use
        key: _group(mesh, [*rows, "pp"], {"pp": ranks})
        for key, (_, users) in shared.items()
        if len(ranks := sorted({rank_of[s] for s in users})) > 1
    }
    found: dict[int, Fact] = {}
    for number, piece in pieces.items():
        placements = {name: placement for name, (_, placement) in parts(piece).items()}
        slices = {id(getattr(m, name)) for m in piece.modules() for name in getattr(m, "partial_gradients", ())}
        for name, p in piece.named_parameters():
            if id(p) in found:  # by another stage of this rank
                found[id(p)] = replace(found[id(p)], stages=(*found[id(p)].stages, number))
                continue
            sums = over_users.get(id(p)) or (over_slices if id(p) in slices else over)
            copies = len(set((over_users.get(id(p)) or over).ranks) & set(counted))
            serial, _ = shared.get(id(p), (name, ()))
            found[id(p)] = Fact(serial, p, sums, placements[name], tp, copies, (number,), id(p) in over_users)
    return list(found.values())


def _group(mesh: Mesh, axes: list[str], among: dict | None = None) -> Group:
    """Along these axes; of this rank alone where there are none."""
    return mesh.group(*axes, among=among) if axes else Group(ranks=(mesh.world.global_rank,))


class ParallelGPT:
    """A GPT on all axes of a mesh: this rank's part of it, with what a training loop needs.

    Args:
        model: whole, equal on all ranks; what this rank does not need of it is let go.
        mesh: with the axes dp, pp and tp.
        optimizer: called with pairs of name and piece.
        schedule: of the pipeline, for as many ranks as pp has; with one, the order of the microbatches.
        sequence_parallel, again: as for `tensor_parallel`.
        zero: what data-parallel ranks share out: nothing (0), the optimizer's state (1), gradients as well (2), and
            parameters (3).
        bucket_bytes: of gradients, up to `zero=2`.
        dtype: to compute and communicate in; needs `zero`, which keeps master weights.

    Raises:
        ValueError: parts that do not fit together, or something that cannot be cut evenly.
    """

    def __init__(
        self,
        model: GPT,
        mesh: Mesh,
        optimizer: MakeOptimizer,
        schedule: Schedule,
        *,
        sequence_parallel: bool = False,
        again: str = "none",
        zero: int = 0,
        bucket_bytes: int = BUCKET_BYTES,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_layout(schedule, mesh.shape.sizes["tp"], zero, again, dtype is not None)
        self.mesh, self.dp, self.pp, self.tp = mesh, *(mesh.group(axis) for axis in ("dp", "pp", "tp"))
        names = {id(p): name for name, p in model.named_parameters()}
        self._serial = {key: (names[id(p)], p.shape) for key, p in model.state_dict(keep_vars=True).items()}
        tensor_parallel(model, self.tp, sequence_parallel, again)
        self.schedule = lower(with_reduce(schedule, each=zero >= 2))
        self._norm_over = mesh.world if zero else mesh.group("pp", "tp")
        if zero == 3:
            self.stages = {0: Stage(model, model.config.d_model)}
            self.facts = list(replicas(model, self.dp))
            stepped = FSDP(model, self.dp, optimizer, op="sum", dtype=dtype)
            self.gradients, self.sharded, self.finish = stepped.gradients, stepped.flats, stepped.finish
        else:
            self.stages = stages_of(model, schedule, self.pp.rank)
            facts = self.facts = facts_of(self.stages, mesh, schedule.rank_of, self._norm_over)
            for fact in facts:
                p = fact.parameter
                p.data.copy_(comm.broadcast(p.data, fact.sum_over))
            if zero:
                self.gradients = sharded_gradients(facts, zero, "sum", bucket_bytes, dtype)
            else:
                self.gradients = Gradients(facts, "sum", bucket_bytes)
            stepped = ShardedOptimizer(self.gradients, optimizer)
            self.sharded = [bucket for bucket in self.gradients.buckets if isinstance(bucket, Flat)]
            self.finish = self.gradients.finish
        self.step_optimizer, self.optimizer, self._publish = stepped.step, stepped.optimizer, stepped.publish

    def step(self, inputs_BT: Tensor, targets_BT: Tensor, max_norm: float) -> Tensor:
        """One step on the global batch, of which each data-parallel rank takes its rows; the same call on all ranks.

        Returns:
            The mean loss over all tokens that count, before the step; float64[], equal on all ranks.
        """
        mine, loss = data.rows_of_rank(len(inputs_BT), self.dp.rank, self.dp.size), self._term_of(targets_BT)
        x, y = (part[mine].to(device()) for part in (inputs_BT, targets_BT))
        term = execute(self.schedule, self.stages, self.pp, x, y, loss, self.gradients).loss
        self.finish()
        with trace.span("optimizer"):
            self.gradients.clip(self._norm_over, max_norm)
            self.step_optimizer()
        return comm.all_reduce(term, self.dp)

    @torch.no_grad()
    def evaluate(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """The mean loss of rows that all ranks are given, in evaluation mode; float64[], equal on all ranks."""
        mine = slice(self.dp.rank, None, self.dp.size)
        x, y = inputs_BT[mine], targets_BT[mine]
        if not len(x):  # a forward may be a collective: take part, with a row that does not count
            x, y = inputs_BT[:1], torch.full_like(targets_BT[:1], -100)
        loss = self._term_of(targets_BT)
        schedule = self.schedule.forward_only(min(len(x), self.schedule.num_microbatches))
        with self._evaluating():
            term = execute(schedule, self.stages, self.pp, x.to(device()), y.to(device()), loss).loss
        return comm.all_reduce(term, self.dp)

    def _term_of(self, targets_BT: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """The loss of some rows, as a term of the mean over all of these targets: each rank has been given all."""
        count = (targets_BT != -100).sum().to(device())
        return partial(vocab_parallel_loss, group=self.tp, count=count)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Inside, no dropout; afterwards each module is in the mode in which it was."""
        modules = [module for stage in self.stages.values() for module in stage.module.modules()]
        before = [module.training for module in modules]
        try:
            for module in modules:
                module.training = False
            yield
        finally:
            for module, mode in zip(modules, before, strict=True):
                module.training = mode

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """The serial model's `state_dict`, in full precision, of any layout; without the optimizer's state.

        All ranks must call it; rank 0 gets it, the others an empty dict.
        """
        collected = {name: x for flat in self.sharded for name, x in flat.collect().items()}
        mine = ((fact, collected.get(fact.name, fact.parameter)) for fact in self.facts)
        whole = {fact.name: unshard(x, fact.placement, fact.cut_over) for fact, x in mine}
        like = next(iter(whole.values()))
        needed = dict(self._serial.values())
        knows = torch.tensor([self.pp.rank if name in whole else -1 for name in needed], device=like.device)
        for who, (name, shape) in zip(comm.all_reduce(knows, self.pp, "max"), needed.items(), strict=True):
            whole[name] = comm.broadcast(whole.get(name, like.new_empty(shape)), self.pp, src=int(who))
        return {} if self.mesh.world.rank else {key: whole[name] for key, (name, _) in self._serial.items()}

    @torch.no_grad()
    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's parts of a serial model's `state_dict`, which each rank is given.

        Raises:
            KeyError: a parameter is not in it.
            ValueError: one has another shape.
        """
        whole = {name: of_shape(shape, key, state[key]) for key, (name, shape) in self._serial.items()}
        flats = {name: flat for flat in self.sharded for name in flat.names}
        for fact in self.facts:
            part = shard(whole[fact.name], fact.placement, fact.cut_over)
            if fact.name in flats:
                flats[fact.name].load(fact.name, part)
            else:
                fact.parameter.copy_(part)
        self._publish()

    def memory(self) -> MemoryTracker:
        """A tracker that knows what is a parameter, a gradient, the optimizer's."""
        self._tracked = nn.ParameterList(x for flat in self.sharded for x in (flat.whole, flat.shard))
        tracker = MemoryTracker(*(stage.module for stage in self.stages.values()), self._tracked, self.optimizer)
        flats = [bucket.flat for bucket in self.gradients.buckets if not isinstance(bucket, Flat)]
        tracker.count_as("gradient", *flats)  # they live on when no p.grad shows them
        return tracker


def check_layout(schedule: Schedule, tp: int, zero: int, again: str = "none", mixed: bool = False) -> None:
    """Whether the techniques fit together.

    Args:
        mixed: computing in another dtype than that of the weights.

    Raises:
        ValueError: they do not, with the reason and the way out.
    """
    pp = schedule.num_ranks
    if again != "none" and any(action.op == Op.W for row in schedule.actions for action in row):
        raise ValueError(
            f"recompute={again} and {schedule.name}: what is computed again in the first half of a backward is gone in "
            "the second; use recompute=none, or a schedule with whole backwards, such as schedule=1f1b"
        )
    if zero == 3 and pp > 1:
        raise ValueError(
            f"zero=3 and pp={pp}: a stage's parameters would be gathered twice for each microbatch; use zero=1, or pp=1"
        )
    if zero == 3 and tp > 1:
        raise ValueError(f"zero=3 and tp={tp}: parameters are shards of whole matrices here; use zero=2, or tp=1")
    if mixed and not zero:
        raise ValueError("compute_dtype needs master weights, which plain data parallelism does not keep; use zero=1")
