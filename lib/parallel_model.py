"""A model on all axes, on one rank: it steps, evaluates, saves and loads together with all other ranks.

The problem: a rank has shards of some layers, pieces of their optimizer state, and rows of the batch; a training loop
wants one object with a step.
The idea: the parts exist. A step is a schedule that is executed (`pipeline/execute.py`), sums of gradients that it
starts, a norm over all ranks, and an optimizer on the pieces that this rank owns. `lib/parallel.py` puts them together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lib import comm, data, trace
from lib.data_parallel.flat import Flat
from lib.data_parallel.fsdp import FSDP
from lib.data_parallel.optimizer import ShardedOptimizer
from lib.data_parallel.state_dicts import check_keys, fitting
from lib.documents import see_documents
from lib.facts import Fact
from lib.launch import device
from lib.layout import TOKEN_AXES
from lib.masks import row_seed
from lib.memory import MemoryTracker
from lib.mesh import Group, Mesh
from lib.moe import MoE, move_bias
from lib.pipeline.execute import execute
from lib.pipeline.schedules.action import Schedule
from lib.pipeline.stage import Stage

BatchLoss = Callable[[Tensor], Callable[[Tensor, Tensor], Tensor]]  # all targets → the loss of some rows


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
class ParallelModel:
    """A model on one rank, which steps, evaluates, saves and loads together with all ranks.

    `parallelize` of `lib/parallel.py` makes it of a GPT, and `assemble` of any model.

    Attributes:
        mesh: of the axes dp, pp and tp, and cp if a sequence is split.
        schedule: the schedule of the pipeline, with all messages and reductions.
        stages: the stages on this rank, by number.
        facts: facts of their parameters.
        owner: steps the parameters that this rank owns.
        loss: function from all targets of a batch to the loss of some of its rows, as `assemble` takes it. Of a GPT it
            gets this rank's logits, [B, T, V/tp], and with cp those of some tokens: there it cannot be replaced.
        norm_over: the ranks over which the gradient norm is summed.
        serial: key of the full `state_dict` → the name of its parameter, and its shape.
        seed: seed of dropout, and of all random numbers in forward.
        part_of: function from some rows to the tokens of them that are this rank's. Default: all of them.
        documents_of: function from some rows to the number of the document of each token, if a row has several.
        gradients: sums their gradients.
        optimizer: the torch optimizer on the owned pieces.
        shapes: serial name → shape, of all parameters of the full model.
        norm: of all gradients before the last `clip`, []; None before the first.
    """

    mesh: Mesh
    schedule: Schedule
    stages: dict[int, Stage]
    facts: list[Fact]
    owner: ShardedOptimizer | FSDP
    loss: BatchLoss
    norm_over: Group
    serial: Mapping[str, tuple[str, torch.Size]]
    seed: int = 0
    part_of: Callable[[Tensor], Tensor] | None = None
    documents_of: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        self.dp, self.pp, self.tp = (self.mesh.group(axis) for axis in ("dp", "pp", "tp"))
        self.part_of = self.part_of or (lambda rows: rows)
        self.over_tokens = self.mesh.group_of_some(*TOKEN_AXES)
        self.gradients, self.optimizer = self.owner.gradients, self.owner.optimizer
        self.shapes = dict(self.serial.values())
        self._made_loss = self.loss
        self._flat_of = {name: flat for flat in self.owner.flats for name in flat.names}
        self.norm: Tensor | None = None
        self._next = 0  # number of the next step
        self._seeds: list[int] = []  # per microbatch of this step
        self._documents: Sequence[Tensor] = ()  # the same
        modules = [module for stage in self.stages.values() for module in stage.module.modules()]
        self._mixtures = [module for module in modules if isinstance(module, MoE)]
        for stage in self.stages.values():
            stage.before = self._before

    def step(self, inputs: Tensor, targets: Tensor, max_norm: float = math.inf, number: int | None = None) -> Tensor:
        """One step on the global batch, from which each data-parallel rank takes its rows; the same call on all ranks.

        Args:
            inputs, targets: [B, …], all rows of the batch.
            max_norm: norm to which all gradients together are clipped. Default: they are not.
            number: number of the step; dropout differs between steps. Default: the next.

        Returns:
            The loss of the batch, before the step; float64[], equal on all ranks.
        """
        term = self.backward(inputs, targets, number)
        with trace.span("optimizer"):
            self.update(max_norm)
        return comm.all_reduce(term, self.over_tokens)

    def backward(self, inputs: Tensor, targets: Tensor, number: int | None = None) -> Tensor:
        """Forward, backward and sum of gradients; return the loss of this rank's rows, as a term of the mean.

        Raises:
            ValueError: fewer rows on a rank than microbatches, or of unequal numbers where each is balanced.
        """
        self._check_rows(len(inputs))
        mine, loss = data.rows_of_rank(len(inputs), self.dp.rank, self.dp.size), self.term_of(targets)
        self._find_documents(inputs[mine], self.schedule)
        x, y = (self.part_of(rows[mine]).to(device()) for rows in (inputs, targets))
        number = self._next if number is None else number
        self._next = number + 1
        pieces = torch.arange(mine.start, mine.stop).tensor_split(self.schedule.num_microbatches)
        self._seeds = [row_seed(self.seed, number, int(rows[0])) for rows in pieces]
        with torch.random.fork_rng([device()] if device().type == "cuda" else []):
            term = execute(self.schedule, self.stages, self.pp, x, y, loss, self.gradients).loss
        self.owner.finish()
        return term

    def _check_rows(self, rows: int) -> None:
        pieces = self.schedule.num_microbatches
        where, fits = f"dp={self.dp.size} x microbatches={pieces}", self.dp.size * pieces
        if rows // self.dp.size < pieces:
            raise ValueError(f"{rows} rows are too few for {where}: use {fits} or more")
        each = (m.options for m in self._mixtures if m.options.balance)
        if rows % fits and any(options.balance_over == "sequence" for options in each):
            raise ValueError(
                f"{rows} rows are not equally many on {where}, and balance_over=sequence takes a mean over each: use a "
                f"multiple of {fits}"
            )

    def update(self, max_norm: float = math.inf) -> None:
        """The end of a step, after `backward`: clip, move the biases of routers, and let the optimizer step."""
        self.clip(max_norm)
        self._move_biases()
        self.owner.step()

    def clip(self, max_norm: float) -> Tensor:
        """Scale all gradients so that the norm over the full model is at most `max_norm`; return the old norm, []."""
        self.norm = self.gradients.clip(self.norm_over, max_norm)
        return self.norm

    @torch.no_grad()
    def _move_biases(self) -> None:
        """Move the biases by which routers balance the loads of experts; they have no gradient. Forget the loads."""
        moves = {id(m.router.bias): m.bias_change() for m in self._mixtures if m.router.bias is not None}
        self._forget_loads()
        for fact, held, span in self.pieces() if moves else ():
            if id(fact.parameter) in moves:
                move_bias(held, moves[id(fact.parameter)][span])

    def zero_grad(self) -> None:
        """Drop all gradients, and loads of experts, such as those of a step that is skipped; all ranks must call it."""
        self.owner.zero_grad()
        self._forget_loads()

    def _forget_loads(self) -> None:
        for mixture in self._mixtures:
            mixture.router.load = None

    def _find_documents(self, rows: Tensor, schedule: Schedule) -> None:
        if self.documents_of is not None:
            self._documents = self.documents_of(rows.to(device())).tensor_split(schedule.num_microbatches)

    def _before(self, microbatch: int) -> None:
        """Set the documents of this microbatch, and the seed of its dropout, equal on all tensor-parallel ranks."""
        for stage in self.stages.values() if self._documents else ():
            see_documents(stage.module, self._documents[microbatch])
        if self._seeds and torch.is_grad_enabled():  # not in evaluation
            torch.manual_seed(self._seeds[microbatch])

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of rows in evaluation mode; all ranks get the same rows; float64[], equal on all ranks."""
        mine = slice(self.dp.rank, None, self.dp.size)
        x, y = inputs[mine], targets[mine]
        has_rows = len(x) > 0
        if not has_rows:  # a forward may contain collectives: take part, with a row that does not count
            x, y = inputs[:1], targets[:1]
        loss = self.term_of(targets)
        # Equal on all ranks, because a forward may contain collectives over ranks with different rows.
        pieces = min(max(1, len(inputs) // self.dp.size), self.schedule.num_microbatches)
        schedule = self.schedule.forward_only(pieces)
        modes = {module: module.training for stage in self.stages.values() for module in stage.module.modules()}
        try:
            for module in modes:
                module.training = False
            self._find_documents(x, schedule)
            x, y = (self.part_of(rows).to(device()) for rows in (x, y))
            term = execute(schedule, self.stages, self.pp, x, y, loss).loss
        finally:
            for module, mode in modes.items():
                module.training = mode
        return comm.all_reduce(term if has_rows else torch.zeros_like(term), self.over_tokens)

    def watch_loss(self, watched: BatchLoss) -> None:
        """Let `watched` stand before the loss: it sees what the loss gets, and gives what the loss gives."""
        self.loss = self._made_loss = watched

    def term_of(self, targets: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """A function for the loss of some rows, as a term of the loss of all these targets, which all ranks hold.

        Raises:
            ValueError: a loss that was replaced, with context parallelism.
        """
        if self.loss is not self._made_loss and (cp := self.mesh.group_of_some("cp").size) > 1:
            raise ValueError(
                f"model.loss was replaced, and on cp={cp} ranks it would get some tokens of each row, not whole rows: "
                "keep the loss of parallelize, or use cp=1"
            )
        return self.loss(targets)

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
            full[fact.name] = fact.whole_of(mine)

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
            part = fact.part_of(whole[fact.name])
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
