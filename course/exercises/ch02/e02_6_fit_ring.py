"""02.6: latency and bandwidth of a link from times of a ring all-reduce; the first also has the setup."""

import torch

from course.check.edits import exercise
from course.check.exercise import DTYPE, kind, known_number, several, whole
from lib.cost import steps

LINK = "alpha_s", "bandwidth_Bps", "setup_s"
SLACK = 1e-3  # of a number that was fitted in float32


def inputs(generator, n):
    ranks = whole(generator, 3, 7), whole(generator, 20, 65)
    machines, links = zip(*(machine(generator, n) for n in ranks), strict=True)
    return [{"machines": machines, "links": links}]


def machine(generator, n):
    """Sizes around the one at which latency and bytes take the same time, in any order."""
    alpha_s, bandwidth_Bps = whole(generator, 5, 50) * 1e-6, whole(generator, 2, 20) * 1e9
    even = n * alpha_s * bandwidth_Bps
    sizes = [int(even * 2**k * whole(generator, 75, 125) / 100) for k in (-5, -3, -1, 0, 1, 2, 3)]
    # Its bytes take time also next to the setup; and it is neither end of a sorted list.
    first = sizes.pop(whole(generator, 4, 6))
    sizes = [first, *(sizes[i] for i in torch.randperm(6, generator=generator).tolist())]
    seconds = [steps.all_reduce_s("ring", size, n, alpha_s, bandwidth_Bps) for size in sizes]
    setup_s = whole(generator, 20, 90) / 10 * seconds[0]  # so little that the time of another call shows in it
    seconds[0] += setup_s
    measured = {"n": n, "sizes": sizes, "seconds": seconds}
    return measured, dict(zip(LINK, (alpha_s, bandwidth_Bps, setup_s)))


def body(answer, group, given):
    found = {}
    for machine in given["machines"]:
        result = answer(machine["n"], list(machine["sizes"]), list(machine["seconds"]))
        link = [known_number(x, ()) for x in several(result, 3)]
        found |= named(machine, kind(result), dict(zip(LINK, link, strict=True)))
    return found


def compared(found, given):
    for machine, link in zip(given["machines"], given["links"], strict=True):
        fitted = named(machine, found[f"{machine['n']} ranks: what was returned"], link)
        found |= {name: known_number(found[name], [right], SLACK) for name, right in fitted.items()}
    return found


def named(machine, returned, link):
    return {f"{machine['n']} ranks: {name}": x for name, x in {"what was returned": returned, **link}.items()}


def reference(given):
    each = zip(given[0]["machines"], given[0]["links"], strict=True)
    first, second = (named(machine, "3 results", link) for machine, link in each)
    return [first | second]


def fit_ring(n, sizes_bytes, seconds):
    more_bytes = sizes_bytes[-1] - sizes_bytes[1]
    slope = (seconds[-1] - seconds[1]) / more_bytes
    height = seconds[1] - slope * sizes_bytes[1]
    alpha_s = height / (2 * (n - 1))
    bandwidth_Bps = 2 * (n - 1) / n / slope
    setup_s = seconds[0] - (height + slope * sizes_bytes[0])
    return alpha_s, bandwidth_Bps, setup_s


def by_least_squares(n, sizes_bytes, seconds):
    height, slope = line(sizes_bytes[1:], seconds[1:])
    return height / (2 * (n - 1)), 2 * (n - 1) / n / slope, seconds[0] - (height + slope * sizes_bytes[0])


def line(sizes_bytes, seconds):
    """Height at 0 bytes, and slope."""
    x, y = (torch.tensor(values, dtype=DTYPE) for values in (sizes_bytes, seconds))
    slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
    return (y.mean() - slope * x.mean()).item(), slope.item()


# After the first call, the largest array takes longest.
MISTAKES = """
in alpha_s, bandwidth_Bps: sizes_bytes[-1] - sizes_bytes[1] => sizes_bytes[-1] - sizes_bytes[0]
seconds[-1] - seconds[1] => seconds[-1] - seconds[0]
seconds[1] - slope * sizes_bytes[1] => seconds[0] - slope * sizes_bytes[0]
or slope = (seconds[-1] - seconds[1]) / more_bytes => height, slope = line(sizes_bytes, seconds)
height = seconds[1] - slope * sizes_bytes[1] =>
    Your line goes through the first time, which contains the setup.
        Fit it to the later times, then compare the first.
lambda n, sizes_bytes, seconds: fit_ring(n, *zip(*sorted(zip(sizes_bytes, seconds))))
or lambda n, sizes_bytes, seconds: by_least_squares(n, *zip(*sorted(zip(sizes_bytes, seconds))))
    You sorted the calls by size and left out the smallest.
        The setup is in the first in time: the lists' first entry.
return alpha_s, bandwidth_Bps, setup_s => return bandwidth_Bps, alpha_s, setup_s
    Latency and bandwidth are right, in the wrong order.
        Return (alpha_s, bandwidth_Bps, setup_s).
in alpha_s:
height / (2 * (n - 1)) => height
    Your latency is the height of the line at 0 bytes: the latency of all 2(n-1) steps.
        Divide by their number.
height / (2 * (n - 1)) => height / (n - 1)
    Your latency counts n - 1 steps.
        An all-reduce has n - 1 of the reduce-scatter and n - 1 of the all-gather.
height / (2 * (n - 1)) => height / n
    Your latency counts n steps.
        A ring all-reduce has 2(n-1).
height / (2 * (n - 1)) => height / (2 * n)
    Your latency counts 2n steps.
        A ring all-reduce has 2(n-1): in n - 1 steps a chunk passes all ranks.
height / (2 * (n - 1)) => min(seconds[1:]) / (2 * (n - 1))
    Your latency is a step of the smallest array, which has bytes in it.
        Take the height of the line at 0 bytes.
height / (2 * (n - 1)) => 1e6 * height / (2 * (n - 1))
    Your latency is in microseconds.
        The name says seconds.
in bandwidth_Bps:
2 * (n - 1) / n / slope => 1 / slope
    Your bandwidth is 1 over the slope, the algorithm bandwidth.
        The link carries 2(n-1)/n bytes for each byte of the array: multiply by that.
2 * (n - 1) / n / slope => (n - 1) / n / slope
    Your bandwidth counts (n-1)/n · S, the reduce-scatter.
        The all-gather sends the same number of bytes again.
2 * (n - 1) / n / slope => 2 * (n - 1) / slope
    Your bandwidth is n times too large.
        A step sends a chunk of S/n, not the full array.
2 * (n - 1) / n / slope => 2 / slope
    Your bandwidth counts 2S per rank, the limit for many ranks.
        A rank sends 2(n-1)/n · S.
2 * (n - 1) / n / slope => slope * n / (2 * (n - 1))
    Your bandwidth is in seconds per byte, like the slope.
        Bytes per second are 1 over the slope.
2 * (n - 1) / n / slope => max(sizes_bytes[1:]) / max(seconds[1:])
or 2 * (n - 1) / n / slope => 2 * (n - 1) / n * max(sizes_bytes[1:]) / max(seconds[1:])
    Your bandwidth is the largest array over its time, as if latencies sent bytes.
        Use the slope of the line.
in all:
seconds[0] - (height + slope * sizes_bytes[0]) => seconds[0]
    Latency and bandwidth are right. Your setup is the full first time.
        Subtract the line's prediction for that size.
seconds[0] - (height + slope * sizes_bytes[0]) => seconds[0] - height
    Latency and bandwidth are right. You subtracted only the latency.
        Subtract the time of its bytes as well.
seconds[0] - (height + slope * sizes_bytes[0]) => seconds[0] - seconds[1]
or seconds[0] - (height + slope * sizes_bytes[0]) => seconds[0] - sum(seconds[1:]) / len(seconds[1:])
    Latency and bandwidth are right. From the first time you subtracted those of arrays with other sizes.
        Subtract the line's prediction for the first size.
seconds[0] - (height + slope * sizes_bytes[0]) => seconds[0] - (alpha_s + sizes_bytes[0] / bandwidth_Bps)
    Latency and bandwidth are right. You subtracted a single message's time.
        It was an all-reduce of 2(n-1) steps.
"""

EXERCISE = exercise(globals(), points=2, right=(fit_ring, by_least_squares), ranks=(1,), withheld=("links",))
