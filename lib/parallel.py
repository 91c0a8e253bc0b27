"""Combine all axes: turn a model and a mesh into shards, gradients and an optimizer that fit together.

The problem: the ranks over which a gradient must be summed depend on all axes: a norm may work on a shard of the
sequence, an embedding may have a second use on a different stage.
The idea: each technique is applied to the model in turn, and keeps the serial names. Then the two facts of every
parameter follow from the mesh (`gradient_ranks.py`), and the rest is composition:

    tensor_parallel(model, mesh.group("tp"))                    each rank has shards of the matrices
    stages = stages_of(model, schedule, mesh.group("pp").rank)  … of some of the layers
    facts = facts_of(stages, mesh, schedule.rank_of)
    sums = Gradients(facts)                                     … whose gradients are sums over these ranks
    optimizer = ShardedOptimizer(sums, adamw)

An unused technique is an axis with one rank. `parallelize` does all of this, and returns an object that can step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lib import comm, data, trace
from lib.cost.sizes import BUCKET_BYTES
from lib.data_parallel.bucketed_gradients import Gradients
from lib.data_parallel.check_optimizer import check_groups
from lib.data_parallel.ddp import broadcast_weights, replicas
from lib.data_parallel.flat import Flat, MakeOptimizer
from lib.data_parallel.fsdp import FSDP
from lib.data_parallel.optimizer import ShardedOptimizer
from lib.data_parallel.state_dicts import check_keys, fitting
from lib.data_parallel.zero import check_range, sharded_gradients
from lib.facts import Fact, serial_names
from lib.gradient_ranks import facts_of
from lib.launch import device
from lib.layout import AXES, Layout
from lib.masks import check_rows, drop_by_rows, row_seed
from lib.memory import MemoryTracker
from lib.mesh import Group, Mesh, MeshShape
from lib.model import GPT
from lib.pipeline.execute import execute
from lib.pipeline.lower import lower
from lib.pipeline.schedules.action import Schedule
from lib.pipeline.schedules.with_reduce import with_reduce
from lib.pipeline.stage import Stage, check_cut, stages_of, tie
from lib.placement import shard, unshard
from lib.tensor_parallel.gpt import tensor_parallel
from lib.tensor_parallel.vocab import vocab_parallel_loss


def parallelize(
    model: GPT,
    mesh: Mesh,
    layout: Layout,
    optimizer: MakeOptimizer,
    *,
    seed: int = 0,
    bucket_bytes: int = BUCKET_BYTES,
    dtype: torch.dtype | None = None,
) -> ParallelGPT:
    """Parallelize a GPT: return this rank's shards, ready for a training loop; the same call on all ranks.

    Args:
        model: full model; all ranks take the values of rank 0, and parameters not needed on this rank are freed.
            Custom layers stay full on the tensor-parallel ranks, or are refused (`tensor_parallel/custom_layers.py`).
        mesh: `Mesh(MeshShape(**layout.sizes), world)`.
        optimizer: function called with pairs of name and piece; it may look at names and attributes of parameters.
        seed: seed of dropout. The elements that `nn.Dropout` drops do not depend on the layout.
        bucket_bytes: size of gradient buckets, up to `zero=2`.
        dtype: dtype of computation and communication; needs `zero`, which keeps master weights.

    Raises:
        ValueError: not a GPT, a layer in it that this layout would compute differently, a mesh that does not match the
            layout, a size that cannot be split evenly, nothing to train, parameters that share memory, an optimizer
            that would treat shards differently, or a dtype that needs loss scaling.
    """
    if not isinstance(model, GPT):
        raise ValueError(
            f"parallelize takes a GPT of lib/model.py, and {type(model).__name__} is none: use FSDP, ZeRO1 or "
            "BucketedDDP of lib/data_parallel, or write stages yourself, Stage(module) of lib/pipeline/stage.py"
        )
    if dict(mesh.shape.sizes) != layout.sizes or [*mesh.shape.axes] != [*layout.sizes]:
        raise ValueError(f"the layout needs a mesh of {MeshShape(**layout.sizes)}, but got {mesh.shape}")
    if dtype is not None and not layout.zero:
        raise ValueError("dtype needs master weights, which plain data parallelism does not keep; use zero=1")
    if dtype is not None and layout.zero < 3 and not all(p.requires_grad for p in model.parameters()):
        raise ValueError("dtype is for parameters that are trained, and some are frozen: omit dtype, or use zero=3")
    dp, pp, tp = (mesh.group(axis) for axis in AXES)
    tie([model])  # refuses parameters that share memory
    check_rows(model, layout.dp * layout.microbatches)
    if layout.pp > 1:
        check_cut(model)
    if layout.tp > 1:  # shards will be new tensors
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        check_groups(optimizer, trained, are_flat=layout.zero > 0)
    if dtype is not None:
        check_range(dtype)
    serial = serial_names(model)
    broadcast_weights(model, mesh.world)
    tensor_parallel(model, tp, layout.sequence_parallel, layout.recompute)
    drop_by_rows(model, (tp.rank, tp.size), (tp.rank, tp.size) if layout.sequence_parallel else (0, 1))
    schedule = layout.make_schedule()
    norm_over = mesh.world if layout.zero else mesh.group("pp", "tp")
    if schedule.num_stages == 1:  # the model itself, with its own forward
        stages = {0: Stage(model, model.config.d_model, slices=model.sequence_slices)}
    else:
        stages = stages_of(model, schedule, pp.rank)
    if layout.zero == 3:
        facts = list(replicas(model, dp))
        owner = FSDP(model, dp, optimizer, op="sum", dtype=dtype)
    else:
        facts = facts_of(stages, mesh, schedule.rank_of, norm_over)
        if layout.zero:
            gradients = sharded_gradients(facts, layout.zero, "sum", bucket_bytes, dtype)
        else:
            gradients = Gradients(facts, "sum", bucket_bytes)
        owner = ShardedOptimizer(gradients, optimizer)
    lowered = lower(with_reduce(schedule, each=layout.zero >= 2))
    return ParallelGPT(mesh, lowered, stages, facts, owner, norm_over, serial, seed)


class Piece(NamedTuple):
    """The part of a parameter that this rank owns, in full precision.

    Args:
        fact: the fact of the parameter.
        held: the owned elements of this rank's shard; the key of their optimizer state, if the optimizer steps them.
        span: range in the flattened shard; all of it without ZeRO.
    """

    fact: Fact
    held: nn.Parameter
    span: slice


@dataclass(eq=False, repr=False)
class ParallelGPT:
    """The GPT on one rank, returned by `parallelize`; it steps, evaluates and loads together with all ranks.

    Attributes:
        schedule: the schedule of the pipeline, with all messages and reductions.
        stages: the stages on this rank, by number.
        facts: facts of their parameters.
        owner: steps the parameters that this rank owns.
        norm_over: the ranks over which the gradient norm is summed.
        serial: key of the full `state_dict` → the name of its parameter, and its shape.
        seed: seed of dropout, and of all random numbers in forward.
        gradients: sums their gradients.
        optimizer: the torch optimizer on the owned pieces.
        shapes: serial name → shape, of all parameters of the full model.
    """

    mesh: Mesh
    schedule: Schedule
    stages: dict[int, Stage]
    facts: list[Fact]
    owner: ShardedOptimizer | FSDP
    norm_over: Group
    serial: Mapping[str, tuple[str, torch.Size]]
    seed: int

    def __post_init__(self) -> None:
        self.dp, self.pp, self.tp = (self.mesh.group(axis) for axis in AXES)
        self.gradients, self.optimizer = self.owner.gradients, self.owner.optimizer
        self.shapes = dict(self.serial.values())
        self._flat_of = {name: flat for flat in self.owner.flats for name in flat.names}
        self._next = 0  # number of the next step
        self._seeds: list[int] = []  # per microbatch of this step
        for stage in self.stages.values():
            stage.before = self._before

    def step(self, inputs_BT: Tensor, targets_BT: Tensor, max_norm: float, number: int | None = None) -> Tensor:
        """One step on the global batch, from which each data-parallel rank takes its rows; the same call on all ranks.

        Args:
            number: number of the step; dropout differs between steps. Default: the next.

        Returns:
            The mean loss over all counted tokens, before the step; float64[], equal on all ranks.
        """
        term = self.backward(inputs_BT, targets_BT, number)
        with trace.span("optimizer"):
            self.clip(max_norm)
            self.owner.step()
        return comm.all_reduce(term, self.dp)

    def backward(self, inputs_BT: Tensor, targets_BT: Tensor, number: int | None = None) -> Tensor:
        """Forward, backward and sum of gradients; return the loss of this rank's rows, as a term of the mean."""
        mine, loss = data.rows_of_rank(len(inputs_BT), self.dp.rank, self.dp.size), self.term_of(targets_BT)
        x, y = (part[mine].to(device()) for part in (inputs_BT, targets_BT))
        number = self._next if number is None else number
        self._next = number + 1
        pieces = torch.arange(mine.start, mine.stop).tensor_split(self.schedule.num_microbatches)
        self._seeds = [row_seed(self.seed, number, int(rows[0])) for rows in pieces]
        with torch.random.fork_rng([device()] if device().type == "cuda" else []):
            term = execute(self.schedule, self.stages, self.pp, x, y, loss, self.gradients).loss
        self.owner.finish()
        return term

    def clip(self, max_norm: float) -> Tensor:
        """Scale all gradients so that the norm over the full model is at most `max_norm`; return the old norm, []."""
        return self.gradients.clip(self.norm_over, max_norm)

    def zero_grad(self) -> None:
        """Drop all gradients, such as those of a step that is skipped; all ranks must call it."""
        self.owner.zero_grad()

    def _before(self, microbatch: int) -> None:
        """Seed dropout for the rows of this microbatch, equally on all tensor-parallel ranks."""
        if self._seeds and torch.is_grad_enabled():  # not in evaluation
            torch.manual_seed(self._seeds[microbatch])

    @torch.no_grad()
    def evaluate(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """The mean loss of rows in evaluation mode; all ranks get the same rows; float64[], equal on all ranks."""
        mine = slice(self.dp.rank, None, self.dp.size)
        x, y = inputs_BT[mine], targets_BT[mine]
        if not len(x):  # a forward may contain collectives: take part, with a row that does not count
            x, y = inputs_BT[:1], torch.full_like(targets_BT[:1], -100)
        loss = self.term_of(targets_BT)
        schedule = self.schedule.forward_only(min(len(x), self.schedule.num_microbatches))
        modes = {module: module.training for stage in self.stages.values() for module in stage.module.modules()}
        try:
            for module in modes:
                module.training = False
            term = execute(schedule, self.stages, self.pp, x.to(device()), y.to(device()), loss).loss
        finally:
            for module, mode in modes.items():
                module.training = mode
        return comm.all_reduce(term, self.dp)

    def term_of(self, targets_BT: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """A function for the loss of some rows, as a term of the mean over these targets, which all ranks hold."""
        count = (targets_BT != -100).sum().to(device())
        return partial(vocab_parallel_loss, group=self.tp, count=count)

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """The `state_dict` of the serial model, in full precision, from any layout; without optimizer state.

        All ranks must call it; rank 0 gets it, the others an empty dict.
        """
        self.owner.settle()
        of_flats = {name: x for flat in self.owner.flats for name, x in flat.collect().items()}
        full: dict[str, Tensor] = {}
        for fact in self.facts:
            mine = of_flats.get(fact.name, fact.parameter)
            full[fact.name] = unshard(mine, fact.placement, fact.cut_over)

        # A rank of the pipeline has some of the parameters: the last rank that has one sends it to the others.
        like = next(iter(full.values()))
        has = torch.tensor([self.pp.rank if name in full else -1 for name in self.shapes], device=like.device)
        senders = comm.all_reduce(has, self.pp, "max").tolist()
        for sender, (name, shape) in zip(senders, self.shapes.items(), strict=True):
            mine = full[name] if name in full else like.new_empty(shape)
            full[name] = comm.broadcast(mine, self.pp, src=sender)
        if self.mesh.world.rank > 0:
            return {}
        return {key: full[name] for key, (name, _) in self.serial.items()}

    @torch.no_grad()
    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load this rank's shards from a `state_dict` of the serial model; each rank needs the dict.

        Raises:
            KeyError: a parameter is not in it.
            ValueError: it has a key that the model has not, or a value of a different shape or kind.
        """
        like = partial(torch.empty, dtype=self.facts[0].parameter.dtype, device="meta")
        here = ((key, *of) for key, of in self.serial.items() if key in state)  # of a tied weight one name is enough
        whole = {name: fitting(state[key], key, like(shape)) for key, name, shape in here}
        check_keys(self.shapes.keys() - whole.keys(), state.keys() - self.serial.keys())
        for fact in self.facts:
            part = shard(whole[fact.name], fact.placement, fact.cut_over)
            if fact.name in self._flat_of:
                self._flat_of[fact.name].load(fact.name, part)
            else:
                fact.parameter.copy_(part)
        self.owner.publish()

    def pieces(self) -> Iterator[Piece]:
        """The owned piece of each parameter, to save or fill it; call `publish` after filling."""
        self.owner.settle()
        for fact in self.facts:
            flat = self._flat_of.get(fact.name)
            if flat is None:
                yield Piece(fact, fact.parameter, slice(0, fact.parameter.numel()))
            elif fact.name in flat.pieces:
                yield Piece(fact, flat.pieces[fact.name], flat.where[fact.name][0])

    def publish(self) -> None:
        """Send filled pieces to all ranks that use them. All ranks must call it."""
        for flat in self.owner.flats:
            flat.copy_master()
        self.owner.publish()

    def memory(self) -> MemoryTracker:
        """A memory tracker with the kinds of all tensors of this rank."""
        self._tracked = nn.ParameterList(x for flat in self.owner.flats for x in (flat.whole, flat.shard))
        tracker = MemoryTracker(*(stage.module for stage in self.stages.values()), self._tracked, self.optimizer)
        flats = [bucket.flat for bucket in self.gradients.buckets if not isinstance(bucket, Flat)]
        tracker.count_as("gradient", *flats)  # they stay allocated without a p.grad
        return tracker
