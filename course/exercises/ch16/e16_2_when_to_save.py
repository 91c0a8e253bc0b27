"""16.2: how long to train between two saves, and the fraction of time that a run then loses."""

import math

import numpy as np

from course.check.edits import exercise
from course.check.exercise import each_result, whole

YEAR_S = 365 * 86_400
WHATS = INTERVAL, LOST = "seconds between saves", "fraction lost"


def inputs(generator, n):
    """Saves that stop the run until they are written, and asynchronous ones; of the last, the disk sets the pace."""
    cases = []
    for write, rare in ((0, 1), (120, 1), (90, 1), (0, 4), (7200, 1)):
        gpus = 2 ** whole(generator, 8, 13)
        fails_s = rare * whole(generator, 3, 9) * YEAR_S
        pause_s = whole(generator, 40, 200) if write == 0 else whole(generator, 3, 15)
        cases.append((gpus, fails_s, pause_s, write, whole(generator, 200, 900)))
    return [{"cases": cases}]


def when_to_save(gpus, gpu_fails_s, pause_s, write_s, restart_s):
    fails_s = gpu_fails_s / gpus
    every_s = max(math.sqrt(2 * pause_s * fails_s), write_s)
    again_s = every_s / 2 + write_s + restart_s
    return every_s, pause_s / every_s + again_s / fails_s


def by_halving(gpus, gpu_fails_s, pause_s, write_s, restart_s):
    """The zero of the derivative, between a second and a year; numbers of numpy's."""
    rate = gpus / gpu_fails_s
    low, high = 1.0, 3.2e7
    for _ in range(100):
        middle = (low + high) / 2
        rises = rate / 2 > pause_s / middle**2
        low, high = (low, middle) if rises else (middle, high)
    every = max(low, write_s)
    return np.array([every, pause_s / every + rate * (every / 2 + write_s + restart_s)])


MISTAKES = """
fails_s = gpu_fails_s / gpus => fails_s = gpu_fails_s
    You use the time between failures of a single GPU.
        The run stops when any of its GPUs fails: divide by their number.
=> fails_s = gpu_fails_s * gpus
    With more GPUs your run fails less often.
        Divide the time between failures by their number.
=> fails_s = gpu_fails_s / math.sqrt(gpus)
    The time between failures falls with the number of GPUs, and not with its root.
        The root is in the interval alone.
math.sqrt(2 * pause_s * fails_s) => math.sqrt(pause_s * fails_s)
    A factor is missing below the root.
        At a failure half of the interval is lost, so the costs are δ/τ and τ/2M: equal at τ = √(2δM).
=> math.sqrt(2 * (pause_s + write_s) * fails_s)
    You count the writing among the costs of a save. While the checkpoint is written the run goes on.
        δ is what a save stops: the pause.
=> math.sqrt(2 * (pause_s + restart_s) * fails_s)
    You count the restart among the costs of a save.
        It comes with each failure, however often you save: it changes what is lost, and not the interval.
=> 2 * pause_s * fails_s
    The root is missing.
        The interval is √(2δM): seconds times seconds, and then the root.
max(math.sqrt(2 * pause_s * fails_s), write_s) => math.sqrt(2 * pause_s * fails_s)
    In one case the next save would begin before the last one is written.
        The interval is at least the time of writing.
=> math.sqrt(2 * pause_s * fails_s) + write_s
    You add the writing to the interval. The run goes on while a checkpoint is written.
        The interval is Young's, or the time of writing if that is longer.
=> max(math.sqrt(2 * pause_s * fails_s), pause_s + write_s)
    You make room for the pause as well. The time counts from the end of a pause, where the writing begins.
        The interval is at least the time of writing.
again_s = every_s / 2 + write_s + restart_s => again_s = every_s + write_s + restart_s
    You lose a whole interval at each failure.
        Failures come at any time within it: on average half is lost.
=> again_s = every_s / 2 + restart_s
    You lose nothing while a checkpoint is written.
        Until it is written, a failure leads back to the one before: on average write_s more is lost.
=> again_s = every_s / 2 + write_s / 2 + restart_s
    A failure loses half of the writing in your sum.
        A checkpoint has the state from before its writing: on average a failure loses all of write_s more.
=> again_s = every_s / 2 + write_s
    The restart is missing.
        Each failure costs restart_s in which nobody trains.
pause_s / every_s + again_s / fails_s => again_s / fails_s
    The saves themselves are missing.
        They cost the pause, once in each interval.
=> (pause_s + write_s) / every_s + again_s / fails_s
    You count the writing as lost in every interval. The run goes on meanwhile.
        It is lost only at a failure.
=> (pause_s + restart_s) / every_s + (again_s - restart_s) / fails_s
    You count a restart in every interval.
        It comes with each failure: once in fails_s.
=> pause_s / every_s + again_s / gpu_fails_s
    Your fraction has the failures of a single GPU.
        Any of the GPUs stops the run: use the same time between failures as for the interval.
=> 1 - (pause_s / every_s + again_s / fails_s)
    That is the goodput.
        Return the fraction that is lost.
=> 100 * (pause_s / every_s + again_s / fails_s)
    You return per cent.
        Return a fraction.
=> math.sqrt(2 * pause_s / fails_s) + (write_s + restart_s) / fails_s
    The fraction is right where the interval is √(2δM). Where the disk sets the interval, it is not.
        Put the interval that you return into δ/τ + τ/2M.
"""

EXERCISE = exercise(
    globals(), points=3, right=(when_to_save, by_halving), body=each_result("when_to_save", *WHATS), ranks=(1,)
)
