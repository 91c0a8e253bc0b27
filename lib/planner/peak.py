"""Bytes that a rank holds at the peak of a step, by kind, as `lib.memory` measures them.

Parameters and optimizer states are sums over tensors. The rest depends on the order: `step_memory` goes through the
actions of the rank, runs each dry (`lib/cost/live.py`), and holds the buffers that live between actions: activations of
microbatches in flight and messages; gradients in buckets are counted beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise

from lib.cost.buffer import Backward, Buffer
from lib.cost.live import LiveGPT
from lib.cost.live_context import Context
from lib.cost.sizes import Weight
from lib.pipeline.lower import message_before, message_behind, other_end, proves
from lib.pipeline.schedules.action import RECVS, SENDS, Action, Op
from lib.planner.plan import Bucketful, Plan


def parameter_bytes(plan: Plan, place: int, ep_rank: int = 0) -> int:
    """Ψ/(t·p) elements, with the padding of buckets that ranks shard."""
    buckets = plan.buckets(place, ep_rank)
    outside = plan.num_parameters(place, ep_rank) - sum(weight.size for one in buckets for weight in one.weights)
    return (sum(bucket.size for bucket in buckets) + outside) * plan.itemsize


def optimizer_bytes(plan: Plan, place: int, *ranks: int) -> int:
    """Two moments of Adam for each parameter, or for this rank's shard of it; per tensor or shard a float32 step count.

    With a `master_itemsize` also the shard of the master weights. `ranks` as in `Plan.place_in`: along dp, tp, cp.
    """
    wide, master = plan.master_itemsize or plan.itemsize, plan.master_itemsize or 0
    owned = _owned(plan, place, *ranks)
    return sum(2 * wide * sum(pieces) + 4 * len(pieces) + master * share for share, pieces in owned)


def _owned(plan: Plan, place: int, dp_rank: int, tp_rank: int, cp_rank: int = 0) -> Iterator[tuple[int, list[int]]]:
    """For each bucket the elements of this rank: in all, with the padding of a shard, and of each parameter."""
    for bucket in plan.buckets(place, plan.ep_rank(dp_rank, cp_rank)):
        share = bucket.size // bucket.shards
        first = share * (plan.place_in(bucket, place, dp_rank, tp_rank, cp_rank) % bucket.shards)
        ends = accumulate((weight.size for weight in bucket.weights), initial=0)
        pieces = [min(end, first + share) - max(start, first) for start, end in pairwise(ends)]
        yield share, [elements for elements in pieces if elements > 0]


def step_memory(plan: Plan, place: int = 0, dp_rank: int = 0, tp_rank: int = 0, cp_rank: int = 0) -> dict[str, int]:
    """The peak of each kind and of the total in one step of a rank; the peaks may be at different times."""
    ranks, ep_rank = (dp_rank, tp_rank, cp_rank), plan.ep_rank(dp_rank, cp_rank)
    state = {"parameter": parameter_bytes(plan, place, ep_rank), "optimizer": optimizer_bytes(plan, place, *ranks)}
    walk = _Walk(plan, place, cp_rank, ep_rank)
    walk.run(_owned(plan, place, *ranks))
    total = walk.total + sum(state.values())
    return state | {"gradient": walk.gradient, "activation": walk.activation, "total": total}


def not_counted(plan: Plan) -> list[str]:
    """Bytes of this run that `step_memory` omits: then activations, and with zero=3 all kinds, are not exact.

    With experts also what `step_traffic` omits.
    """
    left_out = {
        "rows of experts are counted for even routing; a hot expert makes its rank receive, compute and hold more": (
            plan.mixture is not None
        ),
        "zero=3 holds shards, and the units that it gathers beside them; here each parameter is counted once, whole": (
            plan.layout.zero == 3
        ),
        f"schedule={plan.layout.schedule} with zero=2: gradients of W are on their way longer": (
            plan.layout.zero == 2 and bool(plan.schedule.in_halves)
        ),
        f"recompute={plan.layout.recompute} keeps less": plan.layout.recompute != "none",
        "dropout keeps masks, and scores of attention": plan.model.dropout,
        "documents in a row keep a mask of attention": plan.model.document_end is not None,
        "in 16 bit some operations make wider copies": plan.itemsize < 4,
    }
    return [words for words, holds in left_out.items() if holds]


class _Walk:
    """A step of one rank, and the tensors that live between its actions."""

    def __init__(self, plan: Plan, place: int, cp_rank: int, ep_rank: int) -> None:
        layout = plan.layout
        self.plan, self.row = plan, plan.schedule.actions[place]
        self.sums = _Sums(plan, place, ep_rank)
        self.activation = self.gradient = self.total = 0
        tied = layout.num_stages == 1 and plan.shape.tied
        sizes = plan.shape, plan.rows, plan.itemsize
        context = Context(layout.cp, cp_rank, layout.attention, layout.token_order)
        how = layout.tp, layout.sequence_parallel, tied, context, plan.mixture, ep_rank
        self.model = LiveGPT(self.see, self.gradient_made, *sizes, *how)
        # The text, the full batch and its targets, the indices of the sequences of this rank, a loss per microbatch.
        tokens, rows = plan.global_batch * plan.shape.context, plan.global_batch // layout.dp
        self.data = self.model.new(plan.corpus_bytes + 16 * tokens + 8 * rows + 8 * layout.microbatches + 16)
        # Of the sequences of this rank, the tokens that it takes, and their targets: until the optimizer's step.
        self.taken: Buffer | None = self.model.new(16 * rows * plan.own.context * (layout.cp > 1))
        self.outputs: dict[tuple[int, int], Buffer] = {}  # by stage and microbatch
        self.gradients: dict[tuple[int, int], Buffer] = {}  # of outputs
        self.backwards: dict[tuple[int, int], list[Backward]] = {}
        self.deferred: dict[tuple[int, int], list[Backward]] = {key: [] for key in plan.schedule.in_halves}
        self.sent: dict[Action, Buffer] = {}  # gradients
        self.kept: Buffer | None = None  # by the optimizer
        self.proved = proves(plan.schedule, place)

    def run(self, owned: Iterable[tuple[int, list[int]]]) -> None:
        closing = {action for action, behind in pairwise(self.row) if behind.op == Op.REDUCE}
        for action in self.row:
            stage, op, microbatch = action
            if op in RECVS:
                kind, of = (self.outputs, stage - 1) if op == Op.RECV_F else (self.gradients, stage)
                kind[of, microbatch] = self.model.new(self.model.between)
                self.model.new(self.model.between)
            elif op == Op.REDUCE:
                self.sums.reduce()
            elif op not in SENDS:
                if action in closing:
                    self.sums.close(stage)
                self.compute(action)
        self.sums.finish()
        self.taken = None
        self.optimizer_step(owned)

    def see(self) -> None:
        """Record a time in an action, at which no gradient is on its way to a bucket."""
        activation = self.model.live + self.sums.flying
        self.activation = max(self.activation, activation)
        self.gradient = max(self.gradient, self.sums.held)
        self.total = max(self.total, activation + self.sums.held)

    def gradient_made(self, weight: Weight) -> None:
        """A gradient moves to its bucket. If the bucket is allocated now, it first counts as an activation."""
        size, before, waits = weight.size * self.plan.itemsize, self.sums.held, self.model.live + self.sums.flying
        on_its_way = self.sums.made(weight)
        bucket = max(0, on_its_way - before - size)
        self.activation = max(self.activation, waits - size + bucket)
        self.gradient = max(self.gradient, on_its_way)
        self.total = max(self.total, waits - size + on_its_way)

    def compute(self, action: Action) -> None:
        stage, op, microbatch = action
        key, before, schedule = (stage, microbatch), (stage - 1, microbatch), self.plan.schedule
        arrived, sends = message_before(action, schedule), message_behind(action, schedule)
        for send in self.proved.get(other_end(arrived[1]), ()) if arrived else ():
            self.sent.pop(send, None)  # the message for this action proves that it was received
        if op == Op.F:
            x = (self.outputs.pop if arrived else self.outputs.get)(before, None)
            run = self.model.forward(x, self.plan.layers[stage], self.deferred.get(key))
            self.outputs[key], *self.backwards[key] = run
        elif op == Op.W:
            self.model.backward(None, self.deferred.pop(key))
        else:
            ends = self.outputs.pop(key), self.gradients.pop(key, None)  # they live until the backward is through
            of_input = self.model.backward(ends[1], self.backwards.pop(key))
            if sends:
                self.sent[sends[1]] = of_input
            else:
                self.gradients[before] = of_input

    def optimizer_step(self, owned: Iterable[tuple[int, list[int]]]) -> None:
        """Adam allocates two temporary tensors per parameter, and keeps one of them until it updates the next.

        With master weights, a call of Adam steps one bucket, with a copy of its gradients in their precision.
        """
        master = self.plan.master_itemsize
        for share, pieces in owned:
            copied = share * (master or 0)
            self.activation = max(self.activation, self.model.live + copied)  # before it belongs to the pieces
            self.sums.held += copied
            for size in pieces:
                of_adam = size * (master or self.plan.itemsize)
                self.model.new(2 * of_adam)
                self.kept = self.model.new(of_adam)
            if master:
                self.sums.held -= share * (master + (self.plan.itemsize if self.plan.layout.zero >= 2 else 0))
                self.kept = None


class _Sums:
    """Gradients of a rank during a step: bytes that it has `held`, and bytes of sums in flight, `flying`."""

    def __init__(self, plan: Plan, place: int, ep_rank: int) -> None:
        self.zero, self.itemsize = plan.layout.zero, plan.itemsize
        self.buckets = plan.buckets(place, ep_rank)
        self.of = {weight.name: bucket for bucket in self.buckets for weight in bucket.weights}
        self.bytes = {bucket: bucket.size * plan.itemsize for bucket in self.buckets}
        self.held = 0 if self.zero >= 2 else sum(self.bytes.values())
        self.own: dict[str, int] = {}  # gradients outside of any bucket
        self.missing: dict[Bucketful, set[str]] = {}
        self.known: set[str] = set()  # weights with an earlier gradient
        self.sharded: set[Bucketful] = set()  # buckets with an earlier sum
        self.arriving: dict[tuple, tuple[Bucketful, int]] = {}  # by line: the bucket in flight, and its bytes
        # By line, that is by ranks and stages: stages whose last backward before a REDUCE began. Where other ranks also
        # use the weights, zero=2 sums at the end.
        self.full: set[Bucketful] = set()
        self.unsent: dict[tuple, list[Bucketful]] = {}  # by line, in the order of sending
        self.closed = {bucket.line: set() for bucket in self.buckets if self.zero < 2 or not bucket.crosses}

    @property
    def flying(self) -> int:
        return sum(size for _, size in self.arriving.values())

    def close(self, stage: int) -> None:
        """The next backward of this stage is its last before a REDUCE."""
        for line, closed in self.closed.items():
            closed |= {stage} & set(line[1])

    def made(self, weight: Weight) -> int:
        """A weight gradient is computed; return the bytes of all gradients while it is copied into its bucket."""
        bucket, size = self.of[weight.name], weight.size * self.itemsize
        new = size * (weight.name not in (self.known if self.zero < 2 else self.own))
        self.known.add(weight.name)
        closes = set(bucket.stages) <= self.closed.get(bucket.line, set())
        if closes:
            self._open(bucket)
        most = self.held + new
        if closes:
            self._fill(bucket, weight.name)
        elif self.zero >= 2:
            self.held, self.own[weight.name] = most, size
        return most

    def _open(self, bucket: Bucketful) -> None:
        """Gradients begin to fill a bucket, which zero=2 allocates now."""
        if bucket not in self.missing:
            self.missing[bucket] = {weight.name for weight in bucket.weights}
            self.held += self.bytes[bucket] if self.zero >= 2 else 0

    def _fill(self, bucket: Bucketful, name: str) -> None:
        """A gradient moves to its bucket; a full bucket is sent behind those before it."""
        self.missing[bucket].discard(name)
        self.held -= self.own.pop(name, 0)
        if not self.missing[bucket]:
            del self.missing[bucket]
            self.full.add(bucket)
            unsent = self.unsent.setdefault(bucket.line, [])
            unsent += [] if unsent else [one for one in self.buckets if one.line == bucket.line]
            while unsent and unsent[0] in self.full:
                self._send(unsent.pop(0))

    def _send(self, bucket: Bucketful) -> None:
        """Sum a bucket when the sum before it ends: zero=1 receives as many bytes, zero=2 also frees those sent."""
        self.full.remove(bucket)
        self._arrive(bucket.line)
        whole, n = self.bytes[bucket], bucket.ranks
        if self.zero:
            sharded = whole + whole // n if self.zero >= 2 else 0
            self.arriving[bucket.line] = bucket, (whole if n > 1 else 0) + sharded
        self.held -= whole if self.zero >= 2 else 0

    def _arrive(self, line: tuple) -> None:
        """The sum in flight ends; with zero=2 as the shard of this rank, to which later sums are added."""
        bucket, _ = self.arriving.pop(line, (None, 0))
        if bucket is not None and self.zero >= 2 and bucket not in self.sharded:
            self.sharded.add(bucket)
            self.held += self.bytes[bucket] // bucket.ranks

    def reduce(self) -> None:
        """Start the sums of the remaining gradients of lines whose stages all ended their last backward."""
        for line, closed in self.closed.items():
            if closed == set(line[1]):
                for bucket in (bucket for bucket in self.buckets if bucket.line == line):
                    self._send_rest(bucket)
                closed.clear()

    def _send_rest(self, bucket: Bucketful) -> None:
        names = [weight.name for weight in bucket.weights]
        if self.zero >= 2 and (bucket in self.missing or self.own.keys() & {*names}):
            self._open(bucket)
            for name in [*self.missing[bucket]]:
                self._fill(bucket, name)

    def finish(self) -> None:
        for bucket in self.buckets:
            self._send_rest(bucket)
        for line in list(self.arriving):
            self._arrive(line)
