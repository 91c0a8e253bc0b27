"""02.6: latency and bandwidth of a link from times of a ring all-reduce; the first also has the setup."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lib.check.exercise import DTYPE, Data, Exercise, Mistake, kind, known_number, several, whole
from lib.cost import steps
from lib.mesh import Group

ALPHA, BANDWIDTH, SETUP, RETURNED = "alpha_s", "bandwidth_Bps", "setup_s", "what was returned"
SLACK = 1e-3  # of a number that was fitted in float32


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    return [{"machines": [machine(generator, ranks) for ranks in (whole(generator, 3, 7), whole(generator, 20, 65))]}]


def machine(generator: torch.Generator, n: int) -> Data:
    """Sizes around the one at which latency and bytes take the same time, in any order."""
    alpha_s, bandwidth_Bps = whole(generator, 5, 50) * 1e-6, whole(generator, 2, 20) * 1e9
    even = n * alpha_s * bandwidth_Bps
    sizes = [int(even * 2**k * whole(generator, 75, 125) / 100) for k in (-5, -3, -1, 0, 1, 2, 3)]
    # Its bytes take time also next to the setup; and it is neither end of a sorted list.
    first = sizes.pop(whole(generator, 4, 6))
    sizes = [first, *(sizes[i] for i in torch.randperm(6, generator=generator).tolist())]
    setup_s = whole(generator, 20, 200) * 1e-3
    seconds = [steps.all_reduce_s("ring", size, n, alpha_s, bandwidth_Bps) for size in sizes]
    seconds[0] += setup_s
    return {"n": n, "sizes": sizes, "seconds": seconds, ALPHA: alpha_s, BANDWIDTH: bandwidth_Bps, SETUP: setup_s}


def body(answer: Callable, group: Group, given: Data) -> Data:
    found: Data = {}
    for machine in given["machines"]:
        result = answer(machine["n"], list(machine["sizes"]), list(machine["seconds"]))
        title = f"{machine['n']} ranks"
        found[f"{title}: {RETURNED}"] = kind(result)
        for name, x in zip((ALPHA, BANDWIDTH, SETUP), several(result, 3), strict=True):
            found[f"{title}: {name}"] = known_number(x, [machine[name]], SLACK)
    return found


def reference(given: list[Data]) -> list[Data]:
    right: Data = {}
    for machine in given[0]["machines"]:
        right[f"{machine['n']} ranks: {RETURNED}"] = "3 results"
        right |= {f"{machine['n']} ranks: {name}": machine[name] for name in (ALPHA, BANDWIDTH, SETUP)}
    return [right]


# ---- programs -------------------------------------------------------------------------------------------------------


def two_points(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Height at 0 bytes, and slope."""
    slope = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])
    return seconds[0] - slope * sizes[0], slope


def least_squares(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    x, y = (torch.tensor(values, dtype=DTYPE) for values in (sizes, seconds))
    slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
    return (y.mean() - slope * x.mean()).item(), slope.item()


def fit_ring(
    line: Callable = two_points,
    alpha: Callable = lambda height, n, sizes, seconds: height / (2 * (n - 1)),
    bandwidth: Callable = lambda slope, n, sizes, seconds: 2 * (n - 1) / n / slope,
    setup: Callable = lambda height, slope, sizes, seconds: seconds[0] - (height + slope * sizes[0]),
    first: int = 1,
) -> Callable:
    """With a place for each mistake; `first` is the first time that the line uses."""

    def answer(n, sizes_bytes, seconds):
        height, slope = line(sizes_bytes[first:], seconds[first:])
        return (
            alpha(height, n, sizes_bytes, seconds),
            bandwidth(slope, n, sizes_bytes, seconds),
            setup(height, slope, sizes_bytes, seconds),
        )

    return answer


def at_largest(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Bytes per second of the largest array after the first call."""
    size, second = max(zip(sizes[1:], seconds[1:], strict=True))
    return size / second


def sorted_first(line: Callable) -> Callable:
    def answer(n, sizes_bytes, seconds):
        sizes_bytes, seconds = zip(*sorted(zip(sizes_bytes, seconds, strict=True)), strict=True)
        return fit_ring(line)(n, sizes_bytes, seconds)

    return answer


def wrong_alpha(hint: str, of: Callable) -> Mistake:
    return Mistake(hint, fit_ring(alpha=of), about=(ALPHA,))


def wrong_bandwidth(hint: str, of: Callable) -> Mistake:
    return Mistake(hint, fit_ring(bandwidth=of), about=(BANDWIDTH,))


EXERCISE = Exercise(
    id="02.6",
    title="fit_ring",
    points=2,
    body=body,
    inputs=inputs,
    reference=reference,
    ranks=(1,),
    right=(fit_ring(), fit_ring(line=least_squares)),
    mistakes=(
        *(
            Mistake(
                "Your line goes through the first time, which contains the setup of the connections. Fit the line to "
                "the later times, then compare the first time with it.",
                fit_ring(line=line, first=0),
                about=(ALPHA, BANDWIDTH),
            )
            for line in (two_points, least_squares)
        ),
        *(
            Mistake(
                "You sorted the calls by size and left out the smallest. The setup is in the call that came first in "
                "time: take the first entry of the lists as they are.",
                sorted_first(line),
            )
            for line in (two_points, least_squares)
        ),
        Mistake(
            "Latency and bandwidth are right, in the wrong order: return (alpha_s, bandwidth_Bps, setup_s).",
            lambda *given: (lambda a, b, s: (b, a, s))(*fit_ring()(*given)),
        ),
        wrong_alpha(
            "Your latency is the height of the line at 0 bytes: the latency of all 2(n-1) steps. Divide by their "
            "number.",
            lambda height, n, sizes, seconds: height,
        ),
        wrong_alpha(
            "Your latency counts n - 1 steps. An all-reduce has the n - 1 steps of the reduce-scatter and the n - 1 "
            "steps of the all-gather.",
            lambda height, n, sizes, seconds: height / (n - 1),
        ),
        wrong_alpha(
            "Your latency counts n steps. A ring all-reduce has 2(n-1).",
            lambda height, n, sizes, seconds: height / n,
        ),
        wrong_alpha(
            "Your latency counts 2n steps. A ring all-reduce has 2(n-1): in n - 1 steps a chunk passes all ranks.",
            lambda height, n, sizes, seconds: height / (2 * n),
        ),
        wrong_alpha(
            "Your latency is a step of the smallest array, which has bytes in it. Take the height of the line at 0 "
            "bytes.",
            lambda height, n, sizes, seconds: min(zip(sizes[1:], seconds[1:], strict=True))[1] / (2 * (n - 1)),
        ),
        wrong_alpha(
            "Your latency is in microseconds. The name says seconds.",
            lambda height, n, sizes, seconds: 1e6 * height / (2 * (n - 1)),
        ),
        wrong_bandwidth(
            "Your bandwidth is 1 over the slope, the algorithm bandwidth. The link carries 2(n-1)/n bytes for each "
            "byte of the array: multiply by that.",
            lambda slope, n, sizes, seconds: 1 / slope,
        ),
        wrong_bandwidth(
            "Your bandwidth counts (n-1)/n · S, the reduce-scatter. The all-gather sends the same number of bytes "
            "again.",
            lambda slope, n, sizes, seconds: (n - 1) / n / slope,
        ),
        wrong_bandwidth(
            "Your bandwidth is n times too large: a step sends a chunk of S/n, not the full array.",
            lambda slope, n, sizes, seconds: 2 * (n - 1) / slope,
        ),
        wrong_bandwidth(
            "Your bandwidth counts 2S per rank, the limit for many ranks. A rank sends 2(n-1)/n · S.",
            lambda slope, n, sizes, seconds: 2 / slope,
        ),
        wrong_bandwidth(
            "Your bandwidth is in seconds per byte, like the slope. Bytes per second are 1 over the slope.",
            lambda slope, n, sizes, seconds: slope * n / (2 * (n - 1)),
        ),
        *(
            wrong_bandwidth(
                "Your bandwidth is the largest array over its time, which counts the latency of all steps as if bytes "
                "were sent meanwhile. Use the slope of the line.",
                of,
            )
            for of in (
                lambda slope, n, sizes, seconds: at_largest(sizes, seconds),
                lambda slope, n, sizes, seconds: 2 * (n - 1) / n * at_largest(sizes, seconds),
            )
        ),
        Mistake(
            "Latency and bandwidth are right. Your setup is the full first time: subtract the all-reduce, which the "
            "line predicts for that size.",
            fit_ring(setup=lambda height, slope, sizes, seconds: seconds[0]),
        ),
        Mistake(
            "Latency and bandwidth are right. You subtracted only the latency from the first time: subtract the time "
            "of its bytes as well.",
            fit_ring(setup=lambda height, slope, sizes, seconds: seconds[0] - height),
        ),
        Mistake(
            "Latency and bandwidth are right. You subtracted the time of a single message from the first time. It was "
            "an all-reduce of 2(n-1) steps.",
            lambda n, sizes, seconds: (lambda a, b, s: (a, b, seconds[0] - a - sizes[0] / b))(
                *fit_ring()(n, sizes, seconds)
            ),
        ),
    ),
)
