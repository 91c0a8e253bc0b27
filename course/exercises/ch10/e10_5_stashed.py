"""10.5: a rank that steps after every backward, and keeps the weights of each microbatch until its backward."""

from torch import Tensor

from course.check.edits import exercise
from course.check.exercise import AS_NEEDED, MORE, kind, random, several, whole
from lib.memory import MemoryTracker
from lib.pipeline.schedules.one_f_one_b import one_f_one_b

SIZE, LR = 5, 0.1
SLACK = 2  # tensors that a program may have besides: a gradient, a copy of the weights given


def inputs(generator, n):
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

    def __init__(self, given, memory):
        self.given, self.memory, self.calls, self.weights, self.alive = given, memory, [], [], []
        self.gradient(0, given["weights"])  # from now on the tracker counts the numbers given
        self.before = memory.live["total"]

    def gradient(self, k, w):
        return self.given["slopes"][k] @ w + self.given["shifts"][k]

    def note(self, call, w):
        self.alive.append((self.memory.live["total"] - self.before) // (8 * SIZE))
        self.calls.append(call)
        self.weights.append(w.tolist() if isinstance(w, Tensor) else type(w).__name__)

    def forward(self, k, w):
        self.note(f"F{k}", w)

    def backward(self, k, w):
        self.note(f"B{k}", w)
        return self.gradient(k, w)


def body(answer, group, given):
    found = {}
    for number, actions in enumerate(given["cases"]):
        with MemoryTracker() as memory:
            w, case = given["weights"].clone(), Run(given, memory)
            result = answer(list(actions), w, case.forward, case.backward, LR)
        title, first = f"case {number + 1}", next(i for i, (op, _) in enumerate(actions) if op == "B")
        w, most = several(result, 2)
        found |= {f"{title}: what was returned": kind(result), f"{title}: calls": " ".join(case.calls)}
        found |= {f"{title}, {call}: weights": x for call, x in zip(case.calls, case.weights, strict=True)}
        found |= {f"{title}: weights after the last step": w, f"{title}: the most versions": most}
        if len(case.alive) == len(actions):
            few = case.alive[first] <= SLACK
            found[f"{title}: weights kept before the first backward"] = AS_NEEDED if few else MORE
            few = case.alive[-1] <= SLACK + 2  # the newest weights, and those of the last microbatch
            found[f"{title}: weights kept at the last backward"] = AS_NEEDED if few else MORE
    return found


def stashed(actions, w, forward, backward, lr):
    used, most = {}, 1
    for op, k in actions:
        if op == "F":
            used[k] = w
            forward(k, w)
        else:
            w = w - lr * backward(k, used.pop(k))
        versions = {id(one) for one in used.values()} | {id(w)}
        most = max(most, len(versions))
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


MISTAKES = """
in weights, calls:
w = w - lr * backward(k, used.pop(k)) => w -= lr * backward(k, used.pop(k))
    Backward gets the newest weights, but that forward ran through older ones: the result is the gradient of no
    function.
        Keep the weights of each forward. What you keep also changes if you step with -=.
used, most = {}, 1 => used, most, first = {}, 1, w
forward(k, w) => forward(k, first)
    Forwards run through the weights at the start.
        Each forward takes the newest weights.
used, most = {}, 1 => used, most, total = {}, 1, 0
w = w - lr * backward(k, used.pop(k)) => total = total + backward(k, used.pop(k))
return w, most => return w - lr * total, most
    You add up the gradients and step once.
        That is a flush: here a rank steps after every backward.
w = w - lr * backward(k, used.pop(k)) => w = used[k] - lr * backward(k, used.pop(k))
    A step of yours begins at the old weights of its microbatch, and so takes back the steps since then. The gradient is
    of the old weights.
        Subtract it from the newest.
used.pop(k) => used.pop(max(used))
    Backward gets the weights of the latest forward. Backwards run in the order of forwards.
        Look up by microbatch.
w - lr * backward => w + lr * backward
    Your step adds the gradient.
        The loss falls against it.
=> w - lr / (len(actions) // 2) * backward
    You divide the gradients by the number of microbatches, as for a full batch.
        Here each step is of one microbatch.
used.pop(k) => used[k]
    The steps are right. You never free old weights.
        After their last backward nothing needs them: drop the version.
used[k] = w => used[k] = w.clone()
    The steps are right. You copy at each forward. Nothing steps during the warmup.
        Keep references to one version.

in all:
{id(one) for one in used.values()} | {id(w)} => used
    The steps are right. You count microbatches.
        Those that ran forward through the same weights share a version, and the newest weights count too, even if no
        forward has used them yet.
used, most = {}, 1 => used, most = {}, 0
| {id(w)} => - {id(w)}
    The steps are right. You count the old versions only.
        The newest weights are in memory as well.
| {id(w)} =>
    The steps are right. You count only versions in flight.
        The newest weights are in memory before a forward uses them.
"""

EQUIVALENT = """
used.values()} | {id(w)} => [*(used.values())][:-1]} | {id(w)}
    The last forward has the newest weights, which count anyway, and at the next forward it is not the last any more.
"""

EXERCISE = exercise(globals(), points=2, right=(stashed, in_place), ranks=(1,))
