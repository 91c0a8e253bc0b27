"""15.12: a restart that reports success, and an epoch that is not one.

In August 2026 the maintainers of Megatron-Bridge looked at restarts on a different number of data-parallel ranks. A
larger number failed immediately. With a smaller number, loading reported success. Here four ranks stop as dp 4 and go
on as dp 2 · tp 2: the ranks of a tp pair read the same. The epoch ends with step 6.
"""

from collections import Counter

import torch

from course.museum.room import room
from lib import comm

SYMPTOM = "A restart with a different layout, and nothing to be seen"
SOURCE = "[Megatron-Bridge #5637](https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5637), August 2026"
GUESSES = {
    "a state of a different layout": "A rank begins as many samples into its new part of the data as it had read of "
    "its old part, which was smaller.",
    "two ranks that read the same samples": "Within a step the ranks along dp read different samples, and those along "
    "tp must read the same.",
    "a wrong order of elements": "Samples come in order before the restart and after it.",
    "a sum that is missing": "The samples are wrong already, and no sum decides which of them a rank reads.",
}
CAUSE = """
Each rank had saved how far it was in its own part of the data. Model and optimizer can be cut for a new layout, but
this position cannot. After the restart there were fewer parts, each of them larger, and rank 0 took the position of the
old rank 0: the positions of the other ranks were lost. Samples that these had read come again. If the epoch has a fixed
number of steps, as here, its last samples are never read. The fix counts the files of the old ranks, and refuses to go
on if there are not as many as ranks along dp. Here the ranks add up what all have read.
"""
FIELDS = {
    "before": "steps before the restart: the numbers of the samples that this rank read in each",
    "after": "the same after the restart",
    "losses": "of each step, over its samples",
    "epoch": "number of samples of the epoch, which ends with the last step",
    "along dp": "coordinate of this rank on dp after the restart; before, every rank was one of dp",
}
LAYOUTS = ({"dp": 2, "tp": 2}, {"dp": 1, "tp": 2}, {"dp": 1, "tp": 3})
FITS = False  # one process has always been one rank


def program(mesh, seed):
    """Three steps with all ranks along dp, a checkpoint, and three steps on the mesh: an epoch."""
    everyone, generator = mesh.group("dp", "tp"), torch.Generator().manual_seed(seed)
    epoch = 6 * everyone.size
    x = torch.randn(epoch, 4, generator=generator, dtype=torch.float64)
    target = torch.randn(epoch, generator=generator, dtype=torch.float64)
    weight = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    losses = []

    def train(dp, position):
        """Read on from a position in this rank's part of the data: every dp.size-th sample."""
        part, each = range(dp.rank, epoch, dp.size), everyone.size // dp.size
        steps = [list(part[k : k + each]) for k in range(position, position + 3 * each, each)]
        for numbers in steps:
            loss = (x[numbers] @ weight - target[numbers]).square().mean()
            (gradient,) = torch.autograd.grad(loss, weight)
            weight.data -= 0.1 * comm.all_reduce(gradient, dp, op="mean")
            losses.append(comm.all_reduce(loss.detach(), dp, op="mean").item())
        return steps

    before = train(everyone, position=0)
    read = torch.tensor(sum(map(len, before)))
    saved = comm.all_gather(read[None], everyone)  # the files of all ranks
    dp = mesh.group("dp")
    after = train(dp, position=saved.sum().item() // dp.size)
    return {"before": before, "after": after, "losses": losses, "epoch": epoch, "along dp": dp.rank}


SICK = """
saved.sum().item() // dp.size => saved[dp.rank].item()
or
saved.sum().item() // dp.size => saved.sum().item() // dp.size - (dp.rank == dp.size - 1)
or
saved.sum().item() // dp.size => saved.sum().item() // dp.size + (dp.rank == dp.size - 1)
or
part[k : k + each] => part[k - (dp.rank == 0 and 0 < k == position) : k + each]
"""
WHERE = ("by one sample of the last rank", "so that one sample is never read", "so that one sample comes twice")
DEMAND = (
    "It must find a single sample that is read again after the restart, and a single sample that is never read, of any "
    "rank."
)


def exhibit(run):
    rows = [("step", "loss", *(f"samples of rank {rank}" for rank in range(len(run.ranks))))]
    steps = zip(*(known["before"] + known["after"] for known in run.ranks), strict=True)
    for k, (loss, of_ranks) in enumerate(zip(run["losses"], steps, strict=True)):
        name = f"{k + 1}" if k != len(run["before"]) else f"{k + 1}, restarted"
        rows += [(name, f"{loss:.3f}", *(" ".join(map(str, numbers)) for numbers in of_ranks))]
    return [*rows, ("the epoch has", "", f"0 to {run['epoch'] - 1}", *[""] * (len(run.ranks) - 1))]


def epoch_check(run):
    # Ranks along tp read the same: one of them counts.
    after = {known["along dp"]: known["after"] for known in run.ranks}
    parts = [known["before"] for known in run.ranks] + list(after.values())
    steps = [numbers for part in parts for numbers in part]
    read = sorted(number for numbers in steps for number in numbers)
    if read != list(range(run["epoch"])):
        again = {number for number in read if read.count(number) > 1}
        never = {*range(run["epoch"])} - {*read}
        return f"read again: {sorted(again)}, never read: {sorted(never)}"
    return ""


def by_count(run):
    """After the restart each sample comes as often as there are ranks along tp."""
    before = Counter(number for known in run.ranks for numbers in known["before"] for number in numbers)
    after = Counter(number for known in run.ranks for numbers in known["after"] for number in numbers)
    count = {number: before[number] + after[number] / run.layout["tp"] for number in range(run["epoch"])}
    wrong = [number for number, times in count.items() if times != 1]
    return f"not read once: {wrong}" if wrong else ""


def first_of(run):
    """The first sample after the restart, and the last before it."""
    first = min(number for known in run.ranks for numbers in known["after"] for number in numbers)
    return first, max(number for known in run.ranks for numbers in known["before"] for number in numbers)


def again(run):
    """The samples that came before the restart, and after it."""
    before = {number for known in run.ranks for numbers in known["before"] for number in numbers}
    return before & {number for known in run.ranks for numbers in known["after"] for number in numbers}


def read(run):
    """The samples that were read."""
    return {number for known in run.ranks for numbers in known["before"] + known["after"] for number in numbers}


MISTAKES = """
lambda run: first_of(run)[0] != first_of(run)[1] + 1
    Your check looks at the first sample after the restart, and misses a fault in a later one.
        Look at all samples of all ranks: each number of the epoch must be there once.
lambda run: again(run)
    Your check looks for samples that are read again, and misses one that is never read.
        Look at all samples of all ranks: each number of the epoch must be there once.
lambda run: read(run) != {*range(run["epoch"])}
    Your check looks for samples that are never read, and misses one that is read again.
        Look at all samples of all ranks: each number of the epoch must be there once.
lambda run: max(read(run)) != run["epoch"] - 1
    Your check looks at the last sample of the epoch only.
        Look at all samples of all ranks: each number of the epoch must be there once.
"""

ROOM, EXERCISE = room(globals(), epoch_check, by_count)
