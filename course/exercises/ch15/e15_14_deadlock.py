"""15.14: a pipeline that hangs, and hangs again after the repair.

In January 2026 an engineer with AMD GPUs saw that each receive of a pipeline, posted early, delayed the compute after
it. A maintainer of PyTorch changed `Interleaved1F1B`: a rank now receives right before it needs the message. On one
node the program ran a third faster. On two nodes, two ranks with two stages each, it never finished its step. Here
stages 0 and 2 are on rank 0. `run 1F0` is the forward of stage 1 with microbatch 0, and message `1F0` is its input.
"""

from collections import Counter
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import torch
from torch import distributed as dist

from course.museum.room import room
from lib.pipeline.schedules.action import Action
from lib.pipeline.schedules.interleaved import interleaved
from lib.pipeline.simulate import simulate

SYMPTOM = "A step that never ends, on more than one machine"
SOURCE = (
    "[pytorch #172668](https://github.com/pytorch/pytorch/issues/172668) and the change that was tried, "
    "[#172833](https://github.com/pytorch/pytorch/pull/172833), January 2026"
)
GUESSES = {
    "two ranks that wait for each other": "Play the calls: rank 0 comes to its call 4 and rank 1 to its call 3. Both "
    "send, and each receives only after its send.",
    "a message that no rank receives": "Each send in these rows has its receive on the other rank: 2F0 at call 5, 2F1 "
    "at call 8.",
    "a wrong order of elements": "Then the numbers are wrong, and the step ends.",
    "overlap that reads too early": "Each rank makes one call after another, and a wrong number stops no rank.",
}
CAUSE = """
A send may wait until it is received. With each receive right before its use, a rank that sends down the pipeline meets
a rank that sends up, or sends an older activation, and each waits for the other. The thread does not say why one node
ran. With NCCL a [small message](../chapters/10_running.ipynb#break-it-blocking-sends-in-1f1b) may pass before it is
received, and perhaps fewer messages pass between nodes. The engineer then swapped neighbouring sends and receives on
the odd ranks, as Megatron-LM does, and the step hung again: the receive that is missing may be several calls away. The
repair here is PyTorch's order before the change: all messages of the pipeline have one order, and each rank makes its
calls in it. Then the first message that is not done is the next on both its ranks.
"""
FIELDS = {
    "calls": "of this rank, in order: (`send` or `recv`, the peer, the message), or (`run`, this rank, the action). "
    "`2F0` is the forward of stage 2 with microbatch 0, and also the message that this forward needs",
}
LAYOUTS = ({"pp": 2}, {"pp": 3}, {"pp": 4})
FITS = False


def planned(layout, seed):
    """The calls of each rank in a step of interleaved 1F1B, with two stages per rank."""
    p, done = layout["pp"], Counter()
    plan = interleaved(p, p * (2 + seed % 2), 2)
    calls = [[] for _ in range(p)]  # of each rank: (place, call); messages between two actions keep their order
    for rank, action, _, _ in sorted(simulate(plan).slots, key=lambda slot: slot.end):
        stage, op, m = action
        calls[rank].append((done[rank], ("run", rank, str(action))))
        user = Action(stage + (1 if op == "F" else -1), op, m)
        if 0 <= user.stage < 2 * p:
            peer = user.stage % p
            calls[rank].append((done[rank] + 0.5, ("send", peer, str(user))))
            calls[peer].append((done[peer] - 0.5, ("recv", rank, str(user))))
        done[rank] += 1
    return [{"calls": [call for _, call in sorted(row, key=lambda one: one[0])]} for row in calls]


def program(mesh, seed):
    """Run the plan, with stages that multiply by a weight."""
    pp, generator = mesh.group("pp"), torch.Generator().manual_seed(seed)
    weights = torch.randn(2 * pp.size, generator=generator, dtype=torch.float64).requires_grad_()
    batch = torch.randn(3 * pp.size, 5, generator=generator, dtype=torch.float64)
    here, kept = {}, {}  # messages by name; input and output of each forward
    for kind, peer, name in planned({"pp": pp.size}, seed)[pp.rank]["calls"]:
        stage, op, m = Action.parse(name)
        if kind == "recv":
            here[name] = torch.empty_like(batch[m])
            dist.recv(here[name], peer)
        elif kind == "send":
            dist.send(here[name], peer)
        elif op == "F":
            x = here[name].requires_grad_() if stage else batch[m]
            y = x * weights[stage]
            kept[stage, m], here[f"{stage + 1}F{m}"] = (x, y), y.detach()
        else:
            x, y = kept.pop((stage, m))
            y.backward(here.get(name, y.detach()))  # the loss is half the sum of squares
            here[f"{stage - 1}B{m}"] = x.grad
    return {"gradient": weights.grad}


SICK = """
done[peer] - 0.5 => plan.actions[peer].index(user) - 0.4
or
done[peer] - 0.5 => plan.actions[peer].index(user) - (0.6 if peer % 2 else 0.4)
or
done[peer] - 0.5 => plan.actions[peer].index(user) - 0.4 if op == "F" else done[peer] - 0.5
or
done[peer] - 0.5 => plan.actions[peer].index(user) - 0.4 if op == "B" else done[peer] - 0.5
or
done[peer] - 0.5 => plan.actions[peer].index(user) - 0.4 if peer == p - 1 else done[peer] - 0.5
"""
WHERE = ("with neighbours swapped on odd ranks", "of activations", "of gradients", "on the last rank")
DEMAND = (
    "It must find a step that hangs because of its activations alone, because of its gradients alone, or between any "
    "two ranks."
)


def exhibit(run):
    words = {"run": "run {1}", "send": "send {1} to rank {0}", "recv": "receive {1} from rank {0}"}
    rows = [("call", *(f"rank {rank}" for rank in range(len(run.ranks))))]
    of_ranks = [[words[kind].format(peer, name) for kind, peer, name in known["calls"]] for known in run.ranks]
    rows += [(k, *calls) for k, calls in zip(range(1, 9), zip(*of_ranks, strict=False), strict=False)]
    return [*rows, ("…", *(f"and {len(calls) - 8} more" for calls in of_ranks))]


def order_check(run):
    calls = [known["calls"] for known in run.ranks]
    left = [[call for call in mine if call[0] != "run"] for mine in calls]
    moved = True
    while moved:
        moved = False
        for rank, mine in enumerate(left):
            if not mine or mine[0][0] != "send":
                continue
            _, peer, what = mine[0]
            if left[peer][:1] == [("recv", rank, what)]:
                del left[peer][0], mine[0]
                moved = True
    waits = [(rank, *mine[0]) for rank, mine in enumerate(left) if mine]
    return ", ".join(f"rank {r} waits in {kind} {x}" for r, kind, _, x in waits)


def by_circle(run):
    """A message comes after the messages before it on both its ranks, and this must not lead around in a circle."""
    sorter = TopologicalSorter()
    for known in run.ranks:
        for (_, _, before), (_, _, behind) in pairwise(call for call in known["calls"] if call[0] != "run"):
            sorter.add(behind, before)
    try:
        sorter.prepare()
    except CycleError as error:
        return "each comes before the next: " + ", ".join(error.args[1])


MISTAKES = """
for call in mine if call[0] != "run" => for call in mine if call[0] != "run" and "F" in call[2]
    Your check plays the activations, and misses a step that hangs because of its gradients.
        Each rank makes all its calls in one order: play the messages of forward and backward together.
for call in mine if call[0] != "run" => for call in mine if call[0] != "run" and "B" in call[2]
    Your check plays the gradients, and misses a step that hangs because of its activations.
        Each rank makes all its calls in one order: play the messages of forward and backward together.
call[0] != "run"] for mine in calls => {k, call[1]} == {0, 1}] for k, mine in enumerate(calls)
    Your check plays the messages of the first two ranks, and misses others that wait for each other.
        Play the calls of all ranks.
lambda run: any(all(b[2] == a[2] for a, b in pairwise(r["calls"]) if a[0] == "recv") for r in run.ranks)
    Your check asks whether a rank receives each message right before its use. A step with a few such receives hangs as
    well.
        Play the calls: a send waits until its receive is the next call of the peer.
lambda run: any(a[0] + b[0] == "sendrecv" for known in run.ranks[1::2] for a, b in pairwise(known["calls"]))
    You ask that odd ranks receive before they send. One of the sick programs does, and hangs. The healthy program
    does not, and ends.
        Play the calls: a send waits until its receive is the next call of the peer.
"""

ROOM, EXERCISE = room(globals(), order_check, by_circle)
