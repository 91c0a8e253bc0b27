"""10.5: a rank that steps after every backward, and keeps the weights of each microbatch until its backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from course.check.exercise import ANYTHING, AS_NEEDED, MORE, Data, Exercise, Mistake, kind, random, several, whole
from lib.memory import MemoryTracker
from lib.mesh import Group
from lib.pipeline.schedules.one_f_one_b import one_f_one_b

SIZE, LR = 5, 0.1
CALLS, MOST, RETURNED = "calls", "the most versions", "what was returned"
SHARED, FREED = "weights kept before the first backward", "weights kept at the last backward"
STEPS = "weights", CALLS
SLACK = 2  # tensors that a program may have besides: a gradient, a copy of the weights given


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    """Actions of a rank that is ahead by five or six, of one in the middle, of the last, and with few microbatches."""
    ahead, middle = whole(generator, 5, 7), whole(generator, 2, 4)
    sizes = [(ahead, 3 * ahead), (middle, 3 * middle + 1), (1, 4), (ahead, ahead - 1)]
    most = max(m for _, m in sizes)
    return [
        {
            "cases": [[(a.op.value, a.microbatch) for a in one_f_one_b(*size).actions[0]] for size in sizes],
            "weights": random(generator, SIZE),
            "slopes": random(generator, most, SIZE, SIZE) / SIZE,
            "shifts": random(generator, most, SIZE),
        }
    ]


class Run:
    """The microbatches of a case: notes the weights of each call, and how many tensors of their size were added."""

    def __init__(self, given: Data, memory: MemoryTracker) -> None:
        self.given, self.memory = given, memory
        self.calls: list[str] = []
        self.weights: list[object] = []
        self.alive: list[int] = []
        self._gradient(0, given["weights"])  # from now on the tracker counts the numbers given
        self.before = memory.live["total"]

    def _gradient(self, k: int, w: Tensor) -> Tensor:
        return self.given["slopes"][k] @ w + self.given["shifts"][k]

    def _note(self, call: str, w: Tensor) -> None:
        self.alive.append((self.memory.live["total"] - self.before) // (8 * SIZE))
        self.calls.append(call)
        self.weights.append(w.tolist() if isinstance(w, Tensor) else type(w).__name__)

    def forward(self, k: int, w: Tensor) -> None:
        self._note(f"F{k}", w)

    def backward(self, k: int, w: Tensor) -> Tensor:
        self._note(f"B{k}", w)
        return self._gradient(k, w)


def body(answer: Callable, group: Group, given: Data) -> Data:
    found: Data = {}
    for number, actions in enumerate(given["cases"]):
        with MemoryTracker() as memory:
            w, case = given["weights"].clone(), Run(given, memory)
            result = answer(list(actions), w, case.forward, case.backward, LR)
        title, first = f"case {number + 1}", next(i for i, (op, _) in enumerate(actions) if op == "B")
        w, most = several(result, 2)
        found |= {f"{title}: {RETURNED}": kind(result), f"{title}: {CALLS}": " ".join(case.calls)}
        found |= {f"{title}, {call}: weights": x for call, x in zip(case.calls, case.weights, strict=True)}
        found |= {f"{title}: weights after the last step": w, f"{title}: {MOST}": most}
        if len(case.alive) == len(actions):
            found[f"{title}: {SHARED}"] = AS_NEEDED if case.alive[first] <= SLACK else MORE
            # The newest weights, and those of the last microbatch.
            found[f"{title}: {FREED}"] = AS_NEEDED if case.alive[-1] <= SLACK + 2 else MORE
    return found


# ---- programs -------------------------------------------------------------------------------------------------------


def versions(kept: dict[int, Tensor], w: Tensor) -> int:
    return len({id(one) for one in kept.values()} | {id(w)})


def stashed(
    actions,
    w,
    forward,
    backward,
    lr,
    stash: Callable = lambda w: w,
    taken: Callable = lambda kept, k, w: kept.pop(k),
    step: Callable = lambda w, old, change: w - change,
    count: Callable = versions,
    most: object = 1,
):
    """With a place for each mistake; `count` is None where the mistake leaves `most` open."""
    kept: dict[int, Tensor] = {}
    for op, k in actions:
        if op == "F":
            kept[k] = stash(w)
            forward(k, w)
        else:
            old = taken(kept, k, w)
            w = step(w, old, lr * backward(k, old))
        if count:
            most = max(most, count(kept, w))
    return w, most


def in_place(actions, w, forward, backward, lr):
    """One tensor changes, and a version is copied only before a step that would overwrite it."""
    newest, used, copies, most = 0, {}, {}, 1
    for op, k in actions:
        if op == "F":
            used[k] = newest
            forward(k, w)
            continue
        version = used.pop(k)
        g = backward(k, copies.get(version, w))
        if newest in used.values():
            copies[newest] = w.clone()
        if version not in used.values():
            copies.pop(version, None)
        w -= lr * g
        newest += 1
        most = max(most, len(copies) + 1)
    return w, most


def flushed(actions, w, forward, backward, lr):
    total = torch.zeros_like(w)
    for op, k in actions:
        if op == "F":
            forward(k, w)
        else:
            total += backward(k, w)
    return w - lr * total, ANYTHING


def wrong(hint: str, about: tuple[str, ...] = STEPS, **how) -> Mistake:
    return Mistake(hint, partial(stashed, count=None, most=ANYTHING, **how), about=about)


def miscounted(hint: str, count: Callable, most: int = 1) -> Mistake:
    return Mistake(f"The steps are right. {hint}", partial(stashed, count=count, most=most))


def of_newest(kept: dict[int, Tensor], k: int, w: Tensor) -> Tensor:
    kept.pop(k)
    return w


def of_latest(kept: dict[int, Tensor], k: int, w: Tensor) -> Tensor:
    return kept.pop(max(kept))


EXERCISE = Exercise(
    id="10.5",
    title="stashed",
    points=2,
    body=body,
    inputs=inputs,
    ranks=(1,),
    right=(stashed, in_place),
    mistakes=(
        wrong(
            "Backward gets the newest weights, and the forward of that microbatch ran through older ones: the result "
            "is the gradient of no function. Keep the weights of each forward. If you keep the tensor and change it "
            "with -=, what you kept changes as well.",
            taken=of_newest,
        ),
        Mistake(
            "You add up the gradients and step once. That is a flush: here a rank steps after every backward.",
            flushed,
            about=STEPS,
        ),
        wrong(
            "A step of yours begins at the old weights of its microbatch, and so takes back the steps since then. The "
            "gradient is of the old weights; subtract it from the newest.",
            step=lambda w, old, change: old - change,
        ),
        wrong(
            "Backward gets the weights of the latest forward. 1F1B runs backward in the order of the forwards: find "
            "the weights by the number of the microbatch.",
            taken=of_latest,
        ),
        wrong(
            "Your step adds the gradient. The loss falls against it.",
            step=lambda w, old, change: w + change,
        ),
        Mistake(
            "You divide the gradients by the number of microbatches, as for a step of the full batch. Here each step "
            "is of one microbatch.",
            lambda actions, w, forward, backward, lr: stashed(
                actions, w, forward, backward, 2 * lr / len(actions), count=None, most=ANYTHING
            ),
            about=STEPS,
        ),
        wrong(
            "The steps are right. You never free old weights: after the backward of the last microbatch that used "
            "them, nothing needs them.",
            about=(*STEPS, FREED),
            taken=lambda kept, k, w: kept[k],
        ),
        wrong(
            "The steps are right. You copy the weights at each forward. During the warmup nothing steps, so all its "
            "microbatches use one version: keep a reference to it.",
            about=(*STEPS, SHARED),
            stash=lambda w: w.clone(),
        ),
        miscounted(
            "You count microbatches. Those that ran forward through the same weights share a version, and the newest "
            "weights count too, even if no forward has used them yet.",
            lambda kept, w: len(kept),
        ),
        miscounted(
            "You count the old versions only. The newest weights are in memory as well.",
            lambda kept, w: len({id(one) for one in kept.values()} - {id(w)}),
            most=0,
        ),
        miscounted(
            "You count only the versions that microbatches in flight use. After a step the newest weights are in "
            "memory too, before any forward uses them.",
            lambda kept, w: len({id(one) for one in kept.values()}),
        ),
    ),
)
