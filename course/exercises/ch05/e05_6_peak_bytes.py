"""05.6: the peak of a step of FSDP with units of different sizes, next to the measured peak."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from course.check.exercise import SEEN, Data, Exercise, Mistake, call, everywhere, same, whole
from lib import comm
from lib.data_parallel.fsdp import FSDP
from lib.memory import MemoryTracker
from lib.mesh import Group

TENSORS = 4  # in each unit
CLOSE = "the measured bytes, to 1%"


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    """Equal units, and one unit much larger than its neighbours: the peak comes at different times."""
    one = 96 * whole(generator, 20, 40)  # so many that 4 tensors and 3 ranks divide it
    small, medium = (96 * whole(generator, *between) for between in ((8, 16), (24, 40)))
    large = 96 * whole(generator, 120, 200)
    cases = [[one] * 5, [medium, small, large, small, medium]]
    return everywhere({"cases": cases, "peaks": [float(peak_bytes(sizes, n)) for sizes in cases]}, [{}] * n)


class GivenUnit(nn.Module):
    """Four tensors. Forward needs only their sums: activations of a few bytes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(torch.zeros(size // TENSORS) for _ in range(TENSORS))

    def forward(self, x: Tensor) -> Tensor:
        for w in self.tensors:
            x = x + w.sum()
        return x


@cache  # for all answers that are tried in these ranks
def measured(group: Group, sizes: tuple[int, ...]) -> int:
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


def body(answer: Callable, group: Group, given: Data) -> Data:
    found, seen = {}, []
    for sizes, right in zip(given["cases"], given["peaks"], strict=True):
        predicted, really = answer(list(sizes), group.size), measured(group, tuple(sizes))
        name = call("peak_bytes", (sizes, group.size))
        # On a machine that is busy the measured peak can be lower by a buffer: it is shown, and does not judge.
        close = same({name: predicted}, {name: right}, tolerance=0.01)
        found[name] = CLOSE if close else predicted
        seen.append(f"{name}: predicted {predicted!s:.20}, measured {really}")
    return found | {SEEN: "\n".join(seen)}


def reference(given: list[Data]) -> list[Data]:
    return everywhere({call("peak_bytes", (sizes, len(given))): CLOSE for sizes in given[0]["cases"]}, given)


# ---- right programs -------------------------------------------------------------------------------------------------


def peak_bytes(units, n, states=3, ahead=1, newest=1 / TENSORS, receive=1, shards=1, moments="ab"):
    """In backward of unit i, the gradients are complete (a), then leave (b)."""
    peaks = []
    for i in range(len(units)):
        u, before, later = units[i], ahead * units[i - 1] * (i > 0), [*units[i + 1 :], 0]
        base = states * sum(units) / n + u + before
        complete = u + newest * u + (1 + receive + shards / n) * later[0] + shards * sum(later[1:]) / n
        leave = (1 + receive + shards / n) * u + shards * sum(later) / n
        peaks.append(base + max({"a": complete, "b": leave}[moment] for moment in moments))
    return 4 * max(peaks)


def peak_bytes_by_events(units, n):
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


# ---- wrong programs -------------------------------------------------------------------------------------------------


def page(units, n):
    """The formula of equal blocks, with the largest unit for each."""
    u, total = max(units), sum(units)
    return 4 * (3 * total / n + 2 * u + u + 3 * u / n + (2 + 1 / n) * u + u / TENSORS)


EXERCISE = Exercise(
    id="05.6",
    title="peak_bytes",
    points=2,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(peak_bytes, peak_bytes_by_events),
    ranks=(3,),
    timeout_s=20,
    mistakes=(
        Mistake(
            "You put the largest unit into each of the six terms. Neighbours in backward are different units: unit i "
            "computes, i - 1 is prefetched, i + 1 is in flight. Take the maximum over i.",
            page,
        ),
        Mistake(
            "You look only at the time when the gradients of a unit are complete. When they leave, the receive "
            "buffer and the output shard of the same unit are allocated, and the unit is still unsharded: for a unit "
            "that is larger than its neighbours this is the peak.",
            partial(peak_bytes, moments="a"),
        ),
        Mistake(
            "You look only at the time when a unit starts its reduce-scatter. Just before, its gradients are "
            "complete while unit i + 1 is still in flight with two buffers: among equal units this is the peak.",
            partial(peak_bytes, moments="b"),
        ),
        Mistake(
            "That is right for a step without prefetch: unit i - 1 is unsharded as well.",
            partial(peak_bytes, ahead=0),
        ),
        Mistake(
            "The receive buffer is missing: the reduce-scatter of this book is an all-to-all on gloo, and takes a "
            "second buffer of full size.",
            partial(peak_bytes, receive=0),
        ),
        Mistake(
            "The gradient shards are missing: the shards of units that are done, and the output of the reduce-scatter.",
            partial(peak_bytes, shards=0),
        ),
        Mistake(
            "The newest gradient is missing: autograd made it outside the flat tensor, a quarter of a unit.",
            partial(peak_bytes, newest=0),
        ),
        Mistake(
            "You count gradient shards of all units in the model states, and again unit by unit. In backward a rank "
            "has gradient shards only of the units that are done: 3 states from the start, not 4.",
            partial(peak_bytes, states=4),
        ),
        Mistake("You return elements. In float32 each has 4 bytes.", lambda *given: peak_bytes(*given) / 4),
    ),
)
