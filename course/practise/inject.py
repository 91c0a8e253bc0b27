"""How a rank falls ill: each cause replaces a function of `lib` in this process, before the model is built.

A rank is a process of its own that ends with the run, so nothing is put back. Without its place in a layout, a cause
changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature

import torch
from torch import Tensor

from course.practise.causes import CAUSES, kind_of_parameter
from lib import comm, data, parallel, parallel_model
from lib.data_parallel import gradient_sums
from lib.data_parallel.bucket import Bucket
from lib.data_parallel.flat import Flat
from lib.data_parallel.optimizer import ShardedOptimizer
from lib.facts import Fact
from lib.mesh import Group
from lib.model import GPT
from lib.parallel_model import ParallelModel
from lib.pipeline.stage import Stage
from lib.placement import copies_of, shard
from lib.training.config import TrainConfig

ALPHA_S, BANDWIDTH_BPS = 1e-4, 1e8  # of all links of a practice run
SLOWER, LATE_S = 40, 0.06  # a slow link, by its bandwidth; a slow rank, in all its forwards of a step and backwards
WIDER = {torch.bfloat16: torch.float32, torch.float32: torch.float64}


@dataclass(frozen=True)
class Here:
    """Where a rank is, and where a cause strikes: the place without its first word is `number`, if it has one."""

    config: TrainConfig
    rank: int
    place: str
    stack: ExitStack  # of what lasts as long as the run

    @property
    def number(self) -> int:
        return int(self.place.split()[1])

    @property
    def on_stage(self) -> bool:
        return self.config.layout.coordinates(self.rank)["pp"] == self.number

    def crosses(self, group: Group) -> bool:
        """Whether a group has several ranks along the axis of the place."""
        return self.place in group.axis.split("×") and group.size > 1


def fall_ill(sickness: Sequence[tuple[str, str]], config: TrainConfig, rank: int, stack: ExitStack) -> None:
    """Make this rank ill. All ranks of a run call it, also those on which it changes nothing."""
    for name, place in sickness:
        if place in CAUSES[name].places(config.layout, config.model.dropout):
            _HOW[name](Here(config, rank, place, stack))


def _own_count(here: Here) -> None:
    original = ParallelModel.term_of
    layout = here.config.layout
    parts = layout.dp if here.place == "dp" else layout.microbatches

    def term_of(self: ParallelModel, targets_BT: Tensor) -> Callable:
        term = original(self, targets_BT)
        return partial(term.func, **term.keywords | {"count": term.keywords["count"] // parts})

    ParallelModel.term_of = term_of


def _norm_copies(here: Here) -> None:
    original, square, copies = gradient_sums.clip, Fact.square, here.config.layout.dp

    def clip(gradients: object, squares: list[Tensor], *more: object) -> Tensor:
        return original(gradients, [share * copies for share in squares], *more)

    def of_shard(self: Fact, *more: object) -> Tensor:
        return square(self, *more) * copies_of(self.placement, self.parameter.shape, self.cut_over)

    if here.place == "dp":
        gradient_sums.clip = clip
    else:
        Fact.square = of_shard


def _missing_sum(here: Here) -> None:
    original, layout = parallel.facts_of, here.config.layout

    def facts_of(*more: object) -> list[Fact]:
        found = []
        for fact in original(*more):
            if kind_of_parameter(fact.name) == here.place and not fact.crosses:
                partial_over_tp = len(fact.sum_over.ranks) > layout.dp
                alone = fact.cut_over if partial_over_tp else Group("dp", (here.rank,))
                fact = replace(fact, sum_over=alone)
            found.append(fact)
        return found

    parallel.facts_of = facts_of


def _extra_sum(here: Here) -> None:
    def built(model: ParallelModel) -> None:
        for fact in model.facts:
            if kind_of_parameter(fact.name) == "norms":
                fact.parameter.register_hook(partial(comm.all_reduce, group=getattr(model, here.place)))

    _when_built(built)


def _early_read(here: Here) -> None:
    if not here.on_stage:
        return
    inside: list[bool] = []
    late: list[comm.Pending] = []
    all_reduce, reduce_scatter, step = comm.all_reduce_start, comm.reduce_scatter_start, ShardedOptimizer.step

    def all_reduce_start(x: Tensor, group: Group, *more: object, **named: object) -> comm.Pending:
        if not inside:
            return all_reduce(x, group, *more, **named)
        late.append(all_reduce(x.clone(), group))
        return comm.Pending(lambda: x)

    def reduce_scatter_start(x: Tensor, group: Group, *more: object, **named: object) -> comm.Pending:
        if not inside:
            return reduce_scatter(x, group, *more, **named)
        late.append(reduce_scatter(x.clone(), group))
        return comm.Pending(lambda: x.chunk(group.size)[group.rank])

    def sends(kind: type) -> None:
        original = kind.send

        def send(self: Bucket | Flat, group: Group) -> comm.Pending:
            inside.append(True)
            try:
                return original(self, group)
            finally:
                inside.pop()

        kind.send = send

    def then_wait(self: ShardedOptimizer) -> None:
        step(self)
        while late:
            late.pop(0).wait()

    comm.all_reduce_start, comm.reduce_scatter_start = all_reduce_start, reduce_scatter_start
    ShardedOptimizer.step = then_wait
    sends(Bucket)
    sends(Flat)


def _other_start(here: Here) -> None:
    @torch.no_grad()
    def built(model: ParallelModel) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(here.config.seed + 1 + here.number)
            fresh = dict(GPT(here.config.model).named_parameters())
        for fact in model.facts:
            part = shard(fresh[fact.name], fact.placement, fact.cut_over)
            fact.parameter.copy_(part)
            for flat in model.owner.flats:
                if fact.name in flat.names:
                    flat.load(fact.name, part)

    if here.rank == here.number:
        _when_built(built)


def _same_samples(here: Here) -> None:
    original = data.rows_of_rank

    def rows_of_rank(global_batch: int, rank: int, size: int, *more: object) -> slice:
        return original(global_batch, (rank + 1) % size if rank == here.number else rank, size, *more)

    data.rows_of_rank = rows_of_rank


def _same_masks(here: Here) -> None:
    by_seed, by_shard = parallel_model.row_seed, parallel.drop_by_rows
    rows = here.config.global_batch // here.config.layout.dp

    def row_seed(seed: int, step: int, first_row: int) -> int:
        return by_seed(seed, step, first_row % rows)

    def drop_by_rows(model: GPT, *shards: tuple[int, int]) -> None:
        by_shard(model, *((0, count) for _, count in shards))

    if here.place == "dp":
        parallel_model.row_seed = row_seed
    else:
        parallel.drop_by_rows = drop_by_rows


def _lost_microbatches(here: Here) -> None:
    if not here.on_stage:
        return
    now, last = [0], here.config.layout.microbatches - 1

    def noting(original: Callable) -> Callable:
        def run(self: Stage, m: int, *more: object) -> Tensor | None:
            now[0] = m
            return original(self, m, *more)

        return run

    def built(model: ParallelModel) -> None:
        for fact in model.facts:
            fact.parameter.register_hook(lambda gradient: gradient if now[0] == last else torch.zeros_like(gradient))

    Stage.backward_input, Stage.backward_weight = noting(Stage.backward_input), noting(Stage.backward_weight)
    _when_built(built)


def _skipped_step(here: Here) -> None:
    def built(model: ParallelModel) -> None:
        for group in model.optimizer.param_groups:
            group["lr"] = 0.0

    if here.rank == here.number:
        _when_built(built)


def _wide_messages(here: Here) -> None:
    def wider(start: Callable, x: Tensor, **to: Tensor) -> comm.Pending:
        if x.dtype not in WIDER:
            return start(x, **to)
        wide = start(x.to(WIDER[x.dtype]))

        def finish() -> Tensor | None:
            came = wide.wait()
            return came if came is None else to["out"].copy_(came) if to else came.to(x.dtype)

        return comm.Pending(finish, wide.record)

    _each_message(here, wider)


def _sent_twice(here: Here) -> None:
    def twice(start: Callable, x: Tensor, **to: Tensor) -> comm.Pending:
        first, second = start(x.clone()), start(x, **to)

        def finish() -> Tensor | None:
            first.wait()
            return second.wait()

        return comm.Pending(finish, second.record)

    _each_message(here, twice)


def _each_message(here: Here, instead: Callable[..., comm.Pending]) -> None:
    """Start each message along the axis by `instead(start, x)`, or `instead(start, x, out=...)`."""

    def replaced(original: Callable) -> Callable:
        names = signature(original)

        def begin(*given: object, **named: object) -> comm.Pending:
            of = names.bind(*given, **named).arguments
            x, to = of.pop(next(iter(of))), {"out": out} if (out := of.pop("out", None)) is not None else {}
            start = partial(original, **of)
            return instead(start, x, **to) if here.crosses(of["group"]) else start(x, **to)

        return begin

    for name in ("all_reduce_start", "reduce_scatter_start", "all_gather_start", "send", "recv"):
        setattr(comm, name, replaced(getattr(comm, name)))  # the other functions of `lib.comm` call these


def _slow_rank(here: Here) -> None:
    def late(original: Callable) -> Callable:
        def run(*given: object) -> Tensor | None:
            result = original(*given)
            time.sleep(LATE_S / here.config.layout.microbatches)
            return result

        return run

    if here.rank == here.number:
        Stage.forward, Stage.backward_input = late(Stage.forward), late(Stage.backward_input)


def _slow_link(here: Here) -> None:
    slow = comm.link(alpha_s=ALPHA_S, bandwidth_Bps=BANDWIDTH_BPS / SLOWER, axis=here.place)
    here.stack.enter_context(slow)


def _when_built(built: Callable[[ParallelModel], None]) -> None:
    """Call a function with the model as soon as it is built."""
    original = ParallelModel.__post_init__

    def __post_init__(self: ParallelModel) -> None:  # noqa: N807 it replaces one
        original(self)
        built(self)

    ParallelModel.__post_init__ = __post_init__


_HOW: dict[str, Callable[[Here], None]] = {
    "own-count": _own_count,
    "norm-copies": _norm_copies,
    "missing-sum": _missing_sum,
    "extra-sum": _extra_sum,
    "early-read": _early_read,
    "other-start": _other_start,
    "same-samples": _same_samples,
    "same-masks": _same_masks,
    "lost-microbatches": _lost_microbatches,
    "skipped-step": _skipped_step,
    "wide-messages": _wide_messages,
    "sent-twice": _sent_twice,
    "slow-rank": _slow_rank,
    "slow-link": _slow_link,
}
