"""05.6: the peak of a step of FSDP with units of different sizes, next to the measured peak."""

from contextlib import nullcontext
from functools import cache, partial
from itertools import pairwise

import torch
from torch import nn

from course.check.compare import SEEN
from course.check.edits import exercise
from course.check.exercise import call, everywhere, known_number, whole
from lib import comm
from lib.data_parallel.fsdp import FSDP
from lib.memory import MemoryTracker

TENSORS = 4  # in each unit
CLOSE = "the measured bytes, to 1%"


def inputs(generator, n):
    # Equal units, one unit much larger than its neighbours, and a first one: the peak comes at different times.
    one = 96 * whole(generator, 20, 40)  # so many that 4 tensors and 3 ranks divide it
    small, medium = (96 * whole(generator, *between) for between in ((8, 16), (24, 40)))
    large = 96 * whole(generator, 120, 200)
    cases = [[one] * 5, [medium, small, large, small, medium], [large, medium, small]]
    return everywhere(
        {"cases": cases, "peaks": [float(peak_bytes(sizes, n)) for sizes in cases], "ranks": n}, [{}] * n
    )


class GivenUnit(nn.Module):
    """Four tensors. Forward needs only their sums: activations of a few bytes."""

    def __init__(self, size):
        super().__init__()
        self.tensors = nn.ParameterList(torch.zeros(size // TENSORS) for _ in range(TENSORS))

    def forward(self, x):
        return x + sum(w.sum() for w in self.tensors)


@cache  # for all answers that are tried in these ranks
def measured(group, sizes):
    """Live bytes of rank 0 at the peak of its second backward."""
    layers = nn.Sequential(*map(GivenUnit, sizes))
    model = FSDP(layers, group, partial(torch.optim.AdamW, lr=1e-3), units=list(layers))
    model(torch.ones(1)).backward()
    model.finish()
    model.step()
    model.zero_grad()
    loss, memory = model(torch.ones(1)), MemoryTracker(model, model.optimizer)
    with memory if group.rank == 0 else nullcontext():  # it is slow
        loss.backward()
        model.finish()
    return int(comm.broadcast(torch.tensor(memory.peak["total"]), group, src=0))


def body(answer, group, given):
    found, seen = {}, []
    for sizes in given["cases"]:
        name, predicted = call("peak_bytes", (sizes, group.size)), answer(list(sizes), group.size)
        found[name] = known_number(predicted, ())
        # On a machine that is busy the measured peak can be lower by a buffer: it is shown, and does not judge.
        seen.append(f"{name}: predicted {predicted!s:.20}, measured {measured(group, tuple(sizes))}")
    return found | {SEEN: "\n".join(seen)}


def compared(found, given):
    peaks = {call("peak_bytes", (sizes, given["ranks"])): peak for sizes, peak in zip(given["cases"], given["peaks"])}
    return found | {name: CLOSE for name, peak in peaks.items() if known_number(found[name], [peak]) is peak}


def reference(given):
    return everywhere({call("peak_bytes", (sizes, len(given))): CLOSE for sizes in given[0]["cases"]}, given)


def peak_bytes(units, n):
    peak, done = 0, 0  # done: elements of units whose gradients are sums
    in_flight = 0
    for i, unit in reversed(list(enumerate(units))):
        prefetched = units[i - 1] if i > 0 else 0
        always = 3 * sum(units) / n + unit + prefetched
        buffers = 2 * in_flight + in_flight / n
        complete = unit + unit / 4 + buffers + done / n
        done, in_flight = done + in_flight, unit
        leaves = 2 * unit + unit / n + done / n
        peak = max(peak, always + complete, always + leaves)
    return 4 * peak


def by_events(units, n):
    """Each allocation, and each release, in order."""
    live = peak = 12 * sum(units) / n + 4 * units[-1]
    on_the_way = 0
    for size, before in [*pairwise(units[::-1]), (units[0], 0)]:
        live += 4 * (before + size)  # prefetched, and full gradients
        peak = max(peak, live + 4 * size / TENSORS)
        live -= on_the_way  # both buffers of the reduce-scatter
        on_the_way = 8 * size
        live += 4 * size + 4 * size / n
        peak = max(peak, live)
        live -= 4 * size  # resharded
    return peak


MISTAKES = """
returns 4 * (3 * sum(units) / n + (2 + 1 + 2 + 1 / 4) * max(units) + (3 + 1) * max(units) / n)
    You put the largest unit into each of the six terms. Neighbours in backward are different units: unit i computes, i
    - 1 is prefetched, i + 1 is in flight.
        Take the maximum over i.
always + complete, always + leaves => always + complete
    You look only at the time when the gradients of a unit are complete.
        When they leave, the receive buffer and the output shard are allocated while the unit is unsharded: the peak of
        a unit larger than its neighbours.
=> always + leaves
    You look only at the time when a unit starts its reduce-scatter.
        Just before, its gradients are complete while unit i + 1 is still in flight with two buffers: among equal units
        this is the peak.
unit + prefetched => unit
    That is right for a step without prefetch.
        With it, unit i - 1 is unsharded as well while unit i computes.
2 * in_flight => in_flight
2 * unit => unit
    The receive buffer is missing.
        This book's reduce-scatter is an all-to-all on gloo, with a second full-size buffer.
2 * in_flight + in_flight / n => 2 * in_flight
unit / 4 + buffers + done / n => unit / 4 + buffers
2 * unit + unit / n + done / n => 2 * unit
    The gradient shards are missing.
        The shards of units that are done, and the output of the reduce-scatter.
unit + unit / 4 => unit
    The newest gradient is missing.
        Autograd made it outside the flat tensor, a quarter of a unit.
3 * sum(units) => 4 * sum(units)
    You count gradient shards of all units in the model states, and again unit by unit.
        In backward a rank has gradient shards only of the units that are done: 3 states from the start, not 4.
3 * sum(units) => sum(units)
or
3 * sum(units) => 2 * sum(units)
    The shards of the moments are missing, or those of one of them.
        Adam has two: with the parameters these are 3 states.
3 * sum(units) / n => 3 * sum(units)
    You count the full states of the optimizer and the parameters.
        A rank holds 1/n of them.
returns result / 4
    You return elements.
        In float32 each has 4 bytes.
"""

EQUIVALENT = """
complete = unit + unit / 4 + => complete = unit + unit / 3 +
    A twelfth of a unit is less than the 1% by which an answer may differ from the measured peak.
"""

EXERCISE = exercise(globals(), points=2, right=(peak_bytes, by_events), ranks=(3,), timeout_s=20, withheld=("peaks",))
