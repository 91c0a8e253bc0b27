"""The instruments on a rank: what a sick run is measured by, and what it is compared with.

They replace no result: they look at weights, gradients and messages where `lib` has them anyway. Time is that of
`time.perf_counter`, which all ranks of a machine share.
"""

from __future__ import annotations

import time
import types
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from course.practise.causes import kind_of_parameter
from course.practise.draws import drawn_case
from course.practise.inject import ALPHA_S, BANDWIDTH_BPS, fall_ill
from lib import comm, parallel_model
from lib.cost import comm_s
from lib.facts import Fact
from lib.lab.certificate import certify_run
from lib.layout import AXES, Layout
from lib.mesh import Group, Mesh, MeshShape
from lib.parallel_model import ParallelModel
from lib.placement import copies_of, shard
from lib.runtime import calls
from lib.runtime.pending import Pending
from lib.training.config import TrainConfig
from lib.training.loop import train

LINK_ELEMENTS = 16_384  # of the message that measures a link alone
Full = dict[str, Tensor]  # serial name -> full tensor
_CAUSES = fall_ill.__code__.co_filename
_square = Fact.square  # stored now, because a cause may replace it


class Waited(NamedTuple):
    """A message of this rank: when it was started, and the time in which the rank waited for it."""

    step: int
    axis: str
    channel: str
    sums_gradients: bool
    start_s: float
    from_s: float
    to_s: float


@dataclass
class Seen:
    """What one rank saw.

    Attributes:
        report: that of `lib.training.loop.train`.
        norms: norm of each step, before clipping, as the rank computed it.
        squares: what -> kind of parameter -> [ours, theirs, difference]: sums of squares over the elements that this
            rank owns; of a run that is compared with none, [ours]. `weights` before step 1, `gradient` of step 1 before
            clipping, `update` of step 1.
        share: this rank's share of the squared norm of the gradient of step 1.
        marks: (what, parameter) -> two numbers that copies of a tensor have in common, and whether tp ranks hold
            copies.
        samples: a checksum of each sequence that it read in step 1.
        waits: of all messages.
        began_s, ended_s, optimizer_s: of each step: its start, its end, and the start of its optimizer.
        link_s: axis -> seconds of a message along this axis alone; and what `lib.cost` gives it.
        full: of a run that is compared with none: `weights`, `gradient` and `update`, until it is over.
    """

    report: dict = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    squares: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    share: float = 0.0
    marks: dict[tuple[str, str], tuple[float, float, bool]] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)
    waits: list[Waited] = field(default_factory=list)
    began_s: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)
    link_s: dict[str, tuple[float, float]] = field(default_factory=dict)
    full: dict[str, Full] = field(default_factory=dict)


def without_the_cause(work: Callable) -> Callable:
    """The same function; an error inside has a traceback without frames of the file that makes a run ill."""

    @wraps(work)
    def guarded(*given: Any) -> Any:
        try:
            return work(*given)
        except Exception as error:
            frames = [tb for tb in _each(error.__traceback__) if tb.tb_frame.f_code.co_filename != _CAUSES]
            kept: types.TracebackType | None = None
            for tb in reversed(frames):
                kept = types.TracebackType(kept, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
            raise error.with_traceback(kept) from None

    return guarded


def _each(trace_back: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while trace_back is not None:
        yield trace_back
        trace_back = trace_back.tb_next


@without_the_cause
def watched(world: Group, config: TrainConfig, seed: str, twin: bool) -> tuple[Seen | None, Seen]:
    """Train on this rank, and return what was seen: alone and healthy; then with all, and the sickness of a seed.

    The first is the twin: the same training in one process, which the second is compared with. Without a twin it does
    not run at all, so that none of its numbers can be anywhere.
    """
    with ExitStack() as stack:
        alone = _alone(config) if twin else None
        _infect(world, config, seed, stack)
        seen = Seen()
        _attach(seen, config, alone.full if alone else {}, stack)
        seen.report = train(world, config, quiet=True, profile=True)
        for one in (alone, seen):
            if one:
                one.full = {}  # large, and no longer needed
        mesh = Mesh(MeshShape(**config.layout.sizes), world)
        for axis in AXES:
            if getattr(config.layout, axis) > 1:
                seen.link_s[axis] = _link(mesh.group(axis))
        return alone, seen


def _alone(config: TrainConfig) -> Seen:
    """What one process sees of the same training."""
    seen, settings = Seen(), replace(config, layout=Layout(), compute_dtype=None)
    with ExitStack() as stack:
        _attach(seen, settings, {}, stack)
        seen.report = train(Group(), settings, quiet=True)
    return seen


@without_the_cause
def certified(world: Group, config: TrainConfig, seed: str) -> tuple[float, float, float]:
    """What `lib.train --certify` says of the sick run: distances of loss, gradient and weight from one process."""
    with ExitStack() as stack:
        _infect(world, config, seed, stack)
        return certify_run(world, config)


def _infect(world: Group, config: TrainConfig, seed: str, stack: ExitStack) -> None:
    stack.enter_context(comm.link(alpha_s=ALPHA_S, bandwidth_Bps=BANDWIDTH_BPS))
    fall_ill(drawn_case(seed).sickness, config, world.rank, stack)


def _link(group: Group) -> tuple[float, float]:
    """Seconds of a message along an axis with nothing else going on, the fastest of eight; and planned seconds."""
    x, took = torch.zeros(LINK_ELEMENTS), []
    for _ in range(8):
        comm.barrier(group)
        start_s = time.perf_counter()
        comm.all_reduce(x, group)
        took.append(time.perf_counter() - start_s)
    return min(took), comm_s("all_reduce", x.nbytes, group.size, ALPHA_S, BANDWIDTH_BPS)


# ---- attached to the functions of lib -------------------------------------------------------------------------------


def _attach(seen: Seen, config: TrainConfig, alone: dict[str, Full], stack: ExitStack) -> None:
    """Look at each step of a run, until the stack ends; without `alone`, keep what others are compared with."""
    built, clip, step, execute = (
        ParallelModel.__post_init__,
        ParallelModel.clip,
        ParallelModel.step,
        parallel_model.execute,
    )

    start: Full = {}

    def __post_init__(self: ParallelModel) -> None:  # noqa: N807 it replaces one
        built(self)
        _compare(seen, alone, "weights", self, lambda piece: piece.held.detach())
        start.update((piece.fact.name, piece.held.detach().clone()) for piece in self.pieces())
        self.optimizer.register_step_pre_hook(lambda *_: _gradients(seen, alone, self, config.max_norm))

    def of_clip(self: ParallelModel, max_norm: float) -> Tensor:
        seen.optimizer_s.append(time.perf_counter())
        norm = clip(self, max_norm)
        seen.norms.append(norm.item())
        return norm

    def of_step(self: ParallelModel, *given: Any) -> Tensor:
        seen.began_s.append(time.perf_counter())
        loss = step(self, *given)
        seen.ended_s.append(time.perf_counter())
        if len(seen.ended_s) == 1:
            _compare(seen, alone, "update", self, lambda piece: piece.held.detach() - start[piece.fact.name])
        if len(seen.ended_s) == config.steps:
            _mark(seen, "weights", self, lambda p: p.detach())
        return loss

    def of_execute(schedule: Any, stages: Any, group: Group, inputs: Tensor, *given: Any) -> Any:
        seen.samples = seen.samples or [f"{zlib.crc32(str(row).encode()) & 0xFFFF:04x}" for row in inputs.tolist()]
        return execute(schedule, stages, group, inputs, *given)

    for name, now in (("__post_init__", __post_init__), ("clip", of_clip), ("step", of_step)):
        stack.enter_context(patch.object(ParallelModel, name, now))
    stack.enter_context(patch.object(parallel_model, "execute", of_execute))
    stack.enter_context(patch.object(ParallelModel, "memory", lambda self: nullcontext()))  # or a step takes a second
    _attach_to_messages(seen, stack)


def _attach_to_messages(seen: Seen, stack: ExitStack) -> None:
    started: dict[int, tuple[calls.Call, float]] = {}  # by the id of a call, which stays alive here
    wait, depth = Pending.wait, [0]

    def of_wait(self: Pending) -> Any:
        if self.record is None or self._finish is None or depth[0]:
            return wait(self)
        depth[0], from_s = 1, time.perf_counter()
        try:
            return wait(self)
        finally:
            depth[0], call = 0, self.record.call
            if id(call) in started:
                sums = call.kind in ("all_reduce", "reduce_scatter") and "dp" in call.axis and call.payload_bytes > 8
                times = started[id(call)][1], from_s, time.perf_counter()
                seen.waits.append(Waited(len(seen.ended_s), call.axis, call.channel, sums, *times))

    def starts(call: calls.Call) -> None:
        started[id(call)] = call, time.perf_counter()

    calls.listeners.append(calls.Listener(starts, lambda call: None))
    stack.callback(calls.listeners.pop)
    stack.enter_context(patch.object(Pending, "wait", of_wait))


def _gradients(seen: Seen, alone: dict[str, Full], model: ParallelModel, max_norm: float) -> None:
    """Look at the gradients as the optimizer is about to use them, before they were scaled."""
    if "gradient" in seen.squares or len(seen.ended_s):
        return
    scale = min(1.0, max_norm / (seen.norms[-1] + 1e-6))
    _compare(seen, alone, "gradient", model, lambda piece: piece.held.grad / scale)
    if not model.owner.flats:  # or each gradient is on one rank only
        _mark(seen, "gradient", model, lambda p: p.grad / scale)
    is_sharded = bool(model.owner.flats)
    for fact, held, span in model.pieces():
        shards = (span, fact.sum_over.size) if is_sharded else ()
        seen.share += _square(fact, held.grad / scale, *shards).item()


def _compare(seen: Seen, alone: dict[str, Full], what: str, model: ParallelModel, of: Callable) -> None:
    """Add up squares of the elements that this rank owns, and of the same in one process if there is one."""
    found: dict[str, list[float]] = {}
    if alone:
        rows = [(kind, ours, theirs, ours - theirs) for ours, theirs, kind in _pairs(model, alone[what], of)]
    else:
        seen.full[what] = {piece.fact.name: of(piece).clone() for piece in model.pieces()}
        rows = [(kind_of_parameter(name), x) for name, x in seen.full[what].items()]
    for kind, *tensors in rows:
        sums = found.setdefault(kind, [0.0] * len(tensors))
        for i, x in enumerate(tensors):
            sums[i] += x.double().square().sum().item()
    seen.squares[what] = found


def _pairs(model: ParallelModel, alone: Mapping[str, Tensor], of: Callable) -> Iterator[tuple[Tensor, Tensor, str]]:
    for piece in model.pieces():
        theirs = shard(alone[piece.fact.name], piece.fact.placement, piece.fact.cut_over).flatten()[piece.span]
        yield of(piece).flatten(), theirs, kind_of_parameter(piece.fact.name)


def _mark(seen: Seen, what: str, model: ParallelModel, of: Callable) -> None:
    for fact in model.facts:
        x = of(fact.parameter).flatten().double()
        wave = torch.arange(len(x), dtype=torch.float64)
        is_copied = copies_of(fact.placement, fact.parameter.shape, fact.cut_over) == fact.cut_over.size
        seen.marks[what, fact.name] = (x @ wave.cos()).item(), (x @ wave.sin()).item(), is_copied
