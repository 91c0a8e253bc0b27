"""10.4: the loss of an evaluation: forwards alone, over microbatches of different sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy

from lib import comm
from lib.check.exercise import ANYTHING, AS_NEEDED, DTYPE, MORE, Data, Exercise, Mistake, everywhere, random, whole
from lib.mesh import Group
from lib.runtime import calls
from lib.runtime.calls import Call, Listener

WIDTH, CLASSES, PADDING = 3, 3, -100
CASES = "all targets count", "with padding"
LOSS, FORWARDS = "the loss", "forwards"
SAVED = "what is saved for a backward"
SENT, CAME = "outputs that a rank still holds", "inputs that a rank holds"  # when a forward begins
SUM = partial(cross_entropy, reduction="sum")
EARLY, UNFINISHED = "collectives before the last forward", "messages that were not waited for"


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    """Microbatches of one to seven rows; in the second case one is padding alone, and all others have some."""
    cases = {}
    for case in CASES:
        rows = [3, 7, 1, *(whole(generator, 2, 7) for _ in range(whole(generator, n, n + 3)))]
        targets = [torch.randint(CLASSES, (count,), generator=generator) for count in rows]
        if case == CASES[1]:
            for target in targets:
                target[: len(target) // 2] = PADDING
            targets[2][:] = PADDING
        cases[case] = [random(generator, count, WIDTH) for count in rows], targets
    return [{"cases": cases, "weight": random(generator, WIDTH, WIDTH)} for _ in range(n)]


class Stage(nn.Module):
    """A rank's part of the model, which notes at each forward what this rank holds besides."""

    def __init__(self, weight: Tensor, group: Group) -> None:
        super().__init__()
        self.weight, self.sends = nn.Parameter(weight), group.rank < group.size - 1
        self.calls: Counter[str] = Counter()  # started, by kind
        self.in_flight: Counter[str] = Counter()
        self.facts: Data = {FORWARDS: 0, SENT: AS_NEEDED, CAME: AS_NEEDED, EARLY: 0}

    def forward(self, x: Tensor) -> Tensor:
        done, facts = self.facts[FORWARDS], self.facts
        if self.sends and done - (self.calls["send"] - self.in_flight["send"]) > 1:
            facts[SENT] = MORE
        if self.calls["recv"] - done > 2:
            facts[CAME] = MORE
        facts[EARLY] = self.calls.total() - self.calls["send"] - self.calls["recv"]
        facts[FORWARDS] += 1
        return torch.tanh(x @ self.weight)

    def starts(self, call: Call) -> None:
        self.calls[call.kind] += 1
        self.in_flight[call.kind] += 1

    def waits(self, call: Call) -> None:
        self.in_flight[call.kind] -= 1


def body(answer: Callable, group: Group, given: Data) -> Data:
    found: Data = {}
    for case, (batch, targets) in given["cases"].items():
        stage, saved = Stage(given["weight"].clone(), group), []
        # Other answers share the list of listeners: this one is in it only while this answer runs.
        calls.listeners.append(listener := Listener(stage.starts, stage.waits))
        try:
            with saved_tensors_hooks(saved.append, lambda kept: kept):
                loss = answer(stage, batch, targets, WIDTH, group)
        finally:
            calls.listeners.remove(listener)
        facts = {LOSS: loss, **stage.facts, SAVED: "something" if saved else "nothing"}
        facts[UNFINISHED] = stage.in_flight.total()
        found |= {f"{case}: {what}": value for what, value in facts.items()}
    return found


def reference(given: list[Data]) -> list[Data]:
    found: Data = {}
    for case, (batch, targets) in given[0]["cases"].items():
        y = torch.cat(batch)
        for g in given:
            y = torch.tanh(y @ g["weight"])
        loss = cross_entropy(y, torch.cat(targets)).item()
        facts = {LOSS: loss, FORWARDS: len(batch), SENT: AS_NEEDED, CAME: AS_NEEDED, EARLY: 0}
        facts |= {SAVED: "nothing", UNFINISHED: 0}
        found |= {f"{case}: {what}": value for what, value in facts.items()}
    return everywhere(found, given)


# ---- programs -------------------------------------------------------------------------------------------------------


def over_those_that_count(terms: list[Tensor], targets: list[Tensor], group: Group) -> Tensor:
    """Of terms that are zero but on the last rank."""
    return comm.all_reduce(sum(terms), group) / sum((target != PADDING).sum() for target in targets)


def evaluated(
    stage,
    inputs,
    targets,
    width,
    group,
    grad=False,
    term=SUM,
    result=over_those_that_count,
    ahead=1,
    behind=1,
    finish=True,
    each=lambda term, group: term,
):
    """Receives `ahead` microbatches before they are needed, and waits for a send `behind` sends later."""
    rank, last, coming, going, terms = group.rank, group.size - 1, [], [], []

    def receive(k):
        if rank and k < len(inputs):
            coming.append(comm.recv(inputs[k].new_empty(len(inputs[k]), width), group, rank - 1))

    with torch.set_grad_enabled(grad):
        for k in range(ahead):
            receive(k)
        for k, x in enumerate(inputs):
            receive(k + ahead)
            y = stage(coming.pop(0).wait() if rank else x)
            if rank < last:
                if len(going) == behind:
                    going.pop(0).wait()
                going.append(comm.send(y, group, rank + 1))
            terms.append(each(term(y, targets[k]) if rank == last else torch.zeros((), dtype=DTYPE), group))
    for send in going if finish else ():
        send.wait()
    return result(terms, targets, group)


def by_torch_distributed(stage, inputs, targets, width, group):
    """Each message is finished before the rank goes on, as all go one way."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    sums = torch.zeros(2, dtype=DTYPE)
    with torch.inference_mode():
        for x, target in zip(inputs, targets, strict=True):
            if rank > 0:
                dist.recv(x := torch.empty(len(x), width, dtype=DTYPE), src=rank - 1)
            y = stage(x)
            if rank < last:
                dist.send(y, dst=rank + 1)
            elif (counts := target != PADDING).any():
                sums[0] += cross_entropy(y[counts], target[counts]) * counts.sum()
                sums[1] += counts.sum()
        dist.broadcast(sums, src=last)
        return (sums[0] / sums[1]).item()


def all_inputs_first(stage, inputs, targets, width, group):
    """Waits for every input before the first forward."""
    rows = [len(x) for x in inputs]
    if group.rank > 0:
        coming = [comm.recv(torch.empty(count, width, dtype=DTYPE), group, group.rank - 1) for count in rows]
        inputs = [pending.wait() for pending in coming]
    with torch.no_grad():
        outputs = [stage(x) for x in inputs]
    if group.rank < group.size - 1:
        for y in outputs:
            comm.send(y, group, group.rank + 1).wait()
        outputs = [y.new_zeros(len(y), CLASSES) for y in outputs]
    terms = [cross_entropy(y, target, reduction="sum") for y, target in zip(outputs, targets, strict=True)]
    return over_those_that_count([t * (group.rank == group.size - 1) for t in terms], targets, group)


def from_the_last(terms, targets, group, of):
    """`of` the terms, which only the last rank has, on all ranks."""
    return comm.broadcast(of(torch.stack(terms), targets), group, src=group.size - 1)


def rows(targets):
    return torch.tensor([len(target) for target in targets])


def counts(targets):
    return sum((target != PADDING).sum() for target in targets)


def only_the_last(terms, targets, group):
    total = over_those_that_count(terms, targets, group)
    return total if group.rank == group.size - 1 else ANYTHING


def everywhere_counted(terms, targets, group):
    return comm.all_reduce(sum(terms), group) / comm.all_reduce(counts(targets), group)


def shared(term, group):
    return comm.broadcast(term, group, src=group.size - 1)


def of_shared(terms, targets, group):
    return sum(terms) / counts(targets)


def mistake(hint: str, *about: str, **wrong) -> Mistake:
    return Mistake(hint, partial(evaluated, **wrong), about=about or (LOSS,))


def averaged(hint: str, of: Callable, term: Callable = cross_entropy) -> Mistake:
    return mistake(hint, term=term, result=partial(from_the_last, of=of))


EXERCISE = Exercise(
    id="10.4",
    title="evaluated",
    points=3,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(evaluated, by_torch_distributed),
    mistakes=(
        averaged(
            "That is the mean of the microbatches' means. Microbatches have different numbers of targets, and one with "
            "padding alone has no mean: add up the losses of all targets, and divide once.",
            lambda terms, targets: terms.mean(),
        ),
        averaged(
            "You weight the mean of each microbatch by its rows. Rows of padding are no part of that mean, and a "
            "microbatch with padding alone has none (0 times NaN is NaN): add up losses, and count targets.",
            lambda terms, targets: (terms * rows(targets)).sum() / rows(targets).sum(),
        ),
        averaged(
            "You divide by the number of rows. A row of padding adds nothing to the sum, so it must not be counted.",
            lambda terms, targets: terms.sum() / rows(targets).sum(),
            SUM,
        ),
        averaged(
            "That is the sum of all losses. Divide by the targets that count.", lambda terms, _: terms.sum(), SUM
        ),
        mistake(
            "The loss is divided by the number of ranks. All ranks have the same targets and only the last has a loss: "
            "sum the loss over the ranks, and count the targets on one.",
            result=everywhere_counted,
        ),
        mistake(
            "Every forward saves tensors for a backward that never runs: call the stage under torch.no_grad().",
            SAVED,
            grad=True,
        ),
        mistake(
            "The loss of each microbatch goes to all ranks at once. Rank 0 then waits for the last rank before its "
            "next forward, and one microbatch is in the pipeline at a time. Add up first, and share one sum.",
            EARLY,
            each=shared,
            result=of_shared,
        ),
        Mistake(
            "A rank receives all its inputs before its first forward. That takes memory for every microbatch, and if "
            "it waits for them, the next rank has nothing to do meanwhile: receive one in advance at most.",
            all_inputs_first,
            about=(CAME,),
        ),
        mistake(
            "The outputs of all microbatches stay until the end, in the list of their handles. No gradient comes back "
            "here that would show that an output has arrived: wait for the send before the last.",
            SENT,
            behind=10**6,
        ),
        mistake(
            "Not every message is waited for. The last sends may be in flight when the function returns: keep their "
            "handles, and wait.",
            UNFINISHED,
            finish=False,
        ),
        mistake(
            "Only the last rank has the loss. All ranks need it, to decide the same (whether to stop, or to keep a "
            "checkpoint): one collective after the last forward.",
            result=only_the_last,
        ),
    ),
)
