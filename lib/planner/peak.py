"""Bytes that a rank holds at the peak of a step, by kind, as `lib.memory` measures them.

Parameters and optimizer states are sums over tensors. The rest depends on the order: `step_memory` goes through the
actions of the rank, with the tape of each (`lib/cost/live.py`), and counts the tensors that live between actions:
activations of microbatches in flight, messages, gradients in buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lib.cost.live import LiveGPT, Tape
from lib.cost.tensors import Weight
from lib.pipeline.lower import message_before, other_end, proves
from lib.pipeline.schedules.action import RECVS, SENDS, Action, Op
from lib.planner.plan import Bucketful, Plan


def parameter_bytes(plan: Plan, place: int) -> int:
    """Ψ/(t·p) elements, with the padding of buckets that ranks shard."""
    return sum(bucket.size(plan.layout.zero > 0) for bucket in plan.buckets(place)) * plan.itemsize


def optimizer_bytes(plan: Plan, place: int, dp_rank: int, tp_rank: int) -> int:
    """Two moments of Adam for each parameter, or for this rank's shard of it; per tensor or shard a float32 step count.

    With a `master_itemsize` also the shard of the master weights.
    """
    wide, total = plan.master_itemsize or plan.itemsize, 0
    for share, pieces in _owned(plan, place, dp_rank, tp_rank):
        total += 2 * wide * sum(pieces) + 4 * len(pieces) + share * wide * (plan.master_itemsize is not None)
    return total


def _owned(plan: Plan, place: int, dp_rank: int, tp_rank: int) -> Iterator[tuple[int, list[int]]]:
    """For each bucket the elements of this rank: in all, with the padding of a shard, and of each parameter."""
    for bucket in plan.buckets(place):
        share, pieces = bucket.size(False), [weight.size for weight in bucket.weights]
        if plan.layout.zero:
            share = bucket.size(True) // bucket.ranks
            pieces = _overlaps(pieces, share, plan.place_in(bucket, place, dp_rank, tp_rank))
        yield share, pieces


def _overlaps(sizes: list[int], share: int, rank: int) -> list[int]:
    """Elements of each of the concatenated tensors in the shard of a rank, without tensors outside the shard."""
    found, start, low, high = [], 0, share * rank, share * (rank + 1)
    for size in sizes:
        mine = min(start + size, high) - max(start, low)
        found += [mine] if mine > 0 else []
        start += size
    return found


def step_memory(plan: Plan, place: int = 0, dp_rank: int = 0, tp_rank: int = 0) -> dict[str, int]:
    """The peak of each kind and of the total in one step; the peaks may be at different times.

    Args:
        place, dp_rank, tp_rank: coordinates of the rank.
    """
    state = {"parameter": parameter_bytes(plan, place), "optimizer": optimizer_bytes(plan, place, dp_rank, tp_rank)}
    walk = _Walk(plan, place)
    walk.run()
    walk.optimizer_step(_owned(plan, place, dp_rank, tp_rank))
    total = walk.total + sum(state.values())
    return state | {"gradient": walk.gradient, "activation": walk.activation, "total": total}


def not_counted(plan: Plan) -> list[str]:
    """Bytes of this run that `step_memory` omits: then activations, and with zero=3 all kinds, are not exact."""
    layout, left_out = plan.layout, []
    if layout.zero == 3:
        left_out.append("zero=3 shards parameters and gradients; the counts here are unsharded")
    if layout.recompute != "none":
        left_out.append(f"recompute={layout.recompute} keeps less")
    if plan.model.dropout:
        left_out.append("dropout keeps masks, and scores of attention")
    if plan.itemsize < 4:
        left_out.append("in 16 bit some operations make wider copies")
    return left_out


class _Walk:
    """A step of one rank, and the tensors that live between its actions."""

    def __init__(self, plan: Plan, place: int) -> None:
        layout = plan.layout
        self.plan, self.place, self.row = plan, place, plan.schedule.actions[place]
        sizes = plan.shape, plan.rows, plan.itemsize, layout.tp, layout.sequence_parallel
        self.whole, self.halved = LiveGPT(*sizes, split=False), LiveGPT(*sizes, split=True)
        self.between = self.whole.between
        self.sums = _Sums(plan, place)
        # The text, the full batch and its targets, the indices of the sequences of this rank, a loss per microbatch.
        tokens = plan.global_batch * plan.shape.context
        rows = plan.global_batch // layout.dp
        self.held = plan.corpus_bytes + 16 * tokens + 8 * rows + 8 * layout.microbatches + 16
        self.proved = proves(plan.schedule, place)
        self.activation = self.gradient = self.total = 0

    def run(self) -> None:
        back = [a for a in self.row if a.op in (Op.B, Op.W, Op.REDUCE)]
        closing = {a for a, b in zip(back, back[1:], strict=False) if b.op == Op.REDUCE}
        self.see(0)
        for action in self.row:
            stage, op, _ = action
            if op in RECVS:
                self.see(2 * self.between)
                self.held += self.between
            elif op == Op.REDUCE:
                self.sums.reduce(stage)
            elif op not in SENDS:
                if action in closing:
                    self.sums.close(stage)
                tape = Tape(self.see, self.gradient_made)
                self.compute(action, tape)
                self.held += tape.live

    def see(self, live: int) -> None:
        """Record a time at which these bytes are live in the action, in addition to tensors between actions."""
        activation = self.held + live + self.sums.flying
        self.activation = max(self.activation, activation)
        self.gradient = max(self.gradient, self.sums.held)
        self.total = max(self.total, activation + self.sums.held)

    def gradient_made(self, weight: Weight, live: int) -> None:
        """A gradient moves to its bucket. If the bucket is allocated now, it first counts as an activation."""
        size, before, waits = weight.size * self.plan.itemsize, self.sums.held, self.held + self.sums.flying
        on_its_way = self.sums.made(weight)
        bucket = max(0, on_its_way - before - size)
        self.activation = max(self.activation, waits + live - size + bucket)
        self.gradient = max(self.gradient, on_its_way)

    def compute(self, action: Action, tape: Tape) -> None:
        stage, op, microbatch = action
        live = self.halved if (stage, microbatch) in self.plan.schedule.in_halves else self.whole
        layers, last = self.plan.layers[stage], stage == self.plan.layout.num_stages - 1
        head = self.plan.model.num_layers
        self.release_sends(action)
        if op == Op.F:
            if stage == 0:
                live.embed(tape)
            for layer in layers:
                live.head(tape) if layer == head else live.block(tape)
            return
        if op == Op.W:
            for layer in reversed(layers):
                live.head_weight_gradients(tape) if layer == head else live.block_weight_gradients(tape, layer)
            return
        tied = last and stage == 0 and self.plan.shape.tied
        for layer in reversed(layers):
            if layer == head:
                live.head_backward(tape, tied)
            else:
                live.block_backward(tape, layer, held=not last and layer == layers[-1])
        if stage == 0:
            live.embed_backward(tape, tied)
        elif message_before(Action(stage, Op.F, microbatch), self.plan.schedule) is None:
            tape.live += live.between  # its input is the output of a stage on this rank, which still needs it
        if not last:
            # The output gradient may be a factor of a weight gradient, so that W still needs it.
            is_factor = live.split and not live.slices
            tape.live -= live.between * (1 if is_factor else 2)  # the output, and its gradient

    def release_sends(self, action: Action) -> None:
        """Free the sent gradients that a message for this action proves to be used."""
        message = message_before(action, self.plan.schedule)
        for send in self.proved.get(other_end(message[1]), ()) if message else ():
            self.held -= self.between if send.op == Op.SEND_B else 0

    def optimizer_step(self, owned: Iterable[tuple[int, list[int]]]) -> None:
        """Adam allocates two temporary tensors per parameter, and keeps one of them until it updates the next.

        With master weights, a call of Adam steps one bucket, with a copy of its gradients in their precision.
        """
        self.sums.finish()
        master, before = self.plan.master_itemsize, 0
        for share, pieces in owned:
            copied = share * (master or 0)
            self.activation = max(self.activation, self.held + copied)  # before it belongs to the pieces
            self.sums.held += copied
            for size in pieces:
                self.see(before + 2 * size * (master or self.plan.itemsize))
                before = size * (master or self.plan.itemsize)
            if master:
                self.sums.held -= share * (master + (self.plan.itemsize if self.plan.layout.zero >= 2 else 0))
                before = 0


class _Sums:
    """Gradients of a rank during a step.

    Attributes:
        held: bytes of gradients.
        flying: bytes of sums in flight.
    """

    def __init__(self, plan: Plan, place: int) -> None:
        self.zero, self.itemsize = plan.layout.zero, plan.itemsize
        self.buckets = plan.buckets(place)
        self.of = {weight.name: bucket for bucket in self.buckets for weight in bucket.weights}
        self.held = 0 if self.zero >= 2 else sum(map(self._bytes, self.buckets))
        self.own: dict[str, int] = {}  # gradients outside of any bucket
        self.missing: dict[Bucketful, set[str]] = {}
        self.known: set[str] = set()  # weights with an earlier gradient
        self.sharded: set[Bucketful] = set()  # buckets with an earlier sum
        self.arriving: dict[tuple, tuple[Bucketful, int]] = {}  # by line: the bucket in flight, and its bytes
        # By line, that is by ranks and stages: stages whose last backward began, and stages whose last backward ended.
        self.closed, self.through = ({bucket.line: set() for bucket in self.buckets} for _ in range(2))

    @property
    def flying(self) -> int:
        return sum(size for _, size in self.arriving.values())

    def _bytes(self, bucket: Bucketful) -> int:
        return bucket.size(self.zero > 0) * self.itemsize

    def close(self, stage: int) -> None:
        """The next backward of this stage is its last before a REDUCE."""
        for line, closed in self.closed.items():
            closed |= {stage} & set(line[1])

    def made(self, weight: Weight) -> int:
        """A weight gradient is computed; return the bytes of all gradients while it is copied into its bucket."""
        bucket, size = self.of[weight.name], weight.size * self.itemsize
        first, closes = weight.name not in self.known, set(bucket.stages) <= self.closed[bucket.line]
        self.known.add(weight.name)
        if self.zero < 2:
            if closes:
                self._fill(bucket, weight.name)
            return self.held + size * first
        if not closes or bucket.crosses:
            self.held += 0 if weight.name in self.own else size
            self.own[weight.name] = size
            return self.held
        self._allocate(bucket)
        most = self.held + (0 if weight.name in self.own else size)
        self._fill(bucket, weight.name)
        return most

    def _allocate(self, bucket: Bucketful) -> None:
        if self.zero >= 2 and bucket not in self.missing:
            self.held += self._bytes(bucket)

    def _fill(self, bucket: Bucketful, name: str) -> None:
        missing = self.missing.setdefault(bucket, {weight.name for weight in bucket.weights})
        missing.discard(name)
        self.held -= self.own.pop(name, 0)
        if not missing:
            self._send(bucket)

    def _send(self, bucket: Bucketful) -> None:
        """A sum starts when the previous sum ends: zero=1 receives as many bytes, zero=2 also frees the sent bytes."""
        whole, n = self._bytes(bucket), bucket.ranks
        self._arrive(bucket.line)
        received = whole if n > 1 else 0
        if self.zero:
            self.arriving[bucket.line] = bucket, received + (whole + whole // n if self.zero >= 2 else 0)
        self.held -= whole if self.zero >= 2 else 0
        self.missing.pop(bucket, None)

    def _arrive(self, line: tuple) -> None:
        """The sum in flight ends; with zero=2 as the shard of this rank, to which later sums are added."""
        bucket, _ = self.arriving.pop(line, (None, 0))
        if bucket is not None and self.zero >= 2 and bucket not in self.sharded:
            self.sharded.add(bucket)
            self.held += self._bytes(bucket) // bucket.ranks

    def reduce(self, stage: int) -> None:
        """Start the sums of the remaining gradients of the stage."""
        for line, through in self.through.items():
            through |= {stage} & set(line[1])
            of_line = [bucket for bucket in self.buckets if bucket.line == line]
            if through == set(line[1]) and not (self.zero >= 2 and of_line[0].crosses):
                for bucket in of_line:
                    self._send_rest(bucket)
                through.clear()
                self.closed[line].clear()

    def _send_rest(self, bucket: Bucketful) -> None:
        names = [weight.name for weight in bucket.weights]
        if self.zero >= 2 and (bucket in self.missing or self.own.keys() & {*names}):
            self._allocate(bucket)
            for name in list(self.missing.get(bucket, names)):
                self._fill(bucket, name)

    def finish(self) -> None:
        for bucket in self.buckets:
            self._send_rest(bucket)
        for line in list(self.arriving):
            self._arrive(line)
