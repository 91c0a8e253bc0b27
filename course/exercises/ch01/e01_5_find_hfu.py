"""01.5: of a table of training runs, the one whose claimed MFU counts recomputed operations, and its MFU."""

import torch

from course.check.edits import exercise
from course.check.exercise import kind, rounded, several, whole

# MFU in percent, and the operations that its claim counts, over 6 per parameter and token: attention adds to 6, and to
# the 8 of the third run, so that 6/8 of its claim are not its MFU. The first run has the claim nearest to the rule, the
# second the highest, the fifth (long sequences) that with the most percentage points above its MFU, and the last has
# the lowest MFU.
RUNS = (
    ((30, 45), 1.0),
    ((58, 61), 1.03),
    ((14, 17), 1.06 * 8 / 6),
    ((30, 45), 1.05),
    ((47, 50), 1.16),
    ((9, 13), 1.1),
)

FOUND = 2  # counts 8 operations where 6 are needed


def inputs(generator, n):
    def run(percent, counted):
        parameters, gpus = 10**8 * whole(generator, 10, 700), 64 * whole(generator, 2, 33)
        days, peak_flops = whole(generator, 9, 90), (312e12, 989e12)[whole(generator, 0, 2)]
        mfu = whole(generator, *percent)
        tokens = int(round(gpus * peak_flops * mfu / 100 * days * 86_400 / (6 * parameters), -7))
        sizes = {"parameters": parameters, "tokens": tokens, "gpus": gpus, "peak_flops": peak_flops, "days": days}
        return {**sizes, "claimed": round(mfu * counted) / 100}

    def table(place):
        order = [i for i in torch.randperm(len(RUNS), generator=generator).tolist() if i != FOUND]
        order.insert(place, FOUND)
        return [{"name": name, **run(*RUNS[i])} for name, i in zip("ABCDEF", order, strict=True)]

    return [{"tables": [table(place) for place in (0, 5, whole(generator, 1, 5))]}]


def body(answer, group, given):
    found = {}
    for i, runs in enumerate(given["tables"]):
        result = answer([dict(run) for run in runs])
        name, mfu = several(result, 2)
        found |= {
            f"table {i}: what was returned": kind(result),
            f"table {i}: name of the run": name,
            f"table {i}: its MFU in whole percent": rounded(mfu, unit=0.01),
        }
    return found


def find_hfu(runs):
    def mfu(run):
        needed = 6 * run["parameters"] * run["tokens"]
        seconds = 86_400 * run["days"]
        return needed / (run["gpus"] * run["peak_flops"] * seconds)

    run = max(runs, key=lambda run: run["claimed"] / mfu(run))
    return run["name"], mfu(run)


def nearest_to_eight(runs):
    for run in runs:
        gpu_seconds = run["days"] * 24 * 3600 * run["gpus"]
        executed = run["claimed"] * run["peak_flops"] * gpu_seconds / run["tokens"] / run["parameters"]
        if executed > 7.5:
            return [run["name"], torch.tensor(run["claimed"] * 6 / executed)]


MISTAKES = """
in name:
run["claimed"] / mfu(run) => run["claimed"]
    You named the run with the highest claim. A high claim can be true.
        Compare each claim with 6 · parameters · tokens, over the operations that its GPUs could execute in that time.
=> run["claimed"] - mfu(run)
    You named the run whose claim is furthest above 6 · parameters · tokens in percentage points. Its claim counts
    attention, a sixth more at its sequence length. Recomputation adds a third.
        Compare ratios.
=> -mfu(run)
or => -run["claimed"]
    You named the run with the smallest fraction of the peak. Its claim says so.
        Compare the fraction with the claim.
=> -run["claimed"] / mfu(run)
    You named the run whose claim is nearest to the rule of 6 operations.
        Look for the one that is a third above it.
in what was returned:
return run["name"], mfu(run) => return run["name"]
or return run["name"], mfu(run) => return mfu(run)
    You return one value.
        Return two: the name, and the MFU.
return run["name"], mfu(run) => return {"name": run["name"], "mfu": mfu(run)}
    You return a dict.
        Return two values: the name, and the MFU.
in all:
return run["name"], mfu(run) => return mfu(run), run["name"]
    Both values are right, in the wrong order.
        Return the name, then the MFU.
=> return run, mfu(run)
    That is the right run, and you return all of its row.
        Return its name.
=> return run["name"], run["claimed"]
or => return run["name"], mfu(run) * 8 / 6
    That is the right run, and still its HFU: 8 operations, 2 of them for the forward that runs again.
        MFU counts 6.
=> return run["name"], run["claimed"] * 8 / 6
    That is the right run, with the correction upside down. HFU counts more operations.
        Compute it by the rule of 6 operations.
=> return run["name"], run["claimed"] * 6 / 8
    That is the right run. But 6/8 of its claim is not the rule of 6 operations: the claim is rounded, and counts the
    matmuls of attention.
        Take 6 · parameters · tokens, over the operations that its GPUs could execute in that time.
=> return run["name"], mfu(run) * 2 / 6
    That is the right run. But 2 operations per parameter and token are forward alone.
        Backward adds 4.
in MFU: => return run["name"], mfu(run) * run["gpus"]
    Your fraction is of the peak of one GPU. All of them computed.
        Divide by `gpus` as well.
=> return run["name"], mfu(run) * 86_400 / 24
    That is the right run. But you count hours, and the peak is in operations per second.
        A day has 86 400 seconds.
"""

EQUIVALENT = """
run["claimed"] / mfu(run) => (2 * (run["claimed"] / mfu(run)))
or run["claimed"] / mfu(run) => (100 * (run["claimed"] / mfu(run)))
    The largest of several is the same when all are multiplied.
"""

EXERCISE = exercise(globals(), points=1, right=(find_hfu, nearest_to_eight), ranks=(1,))
