"""14.1: the step of a pipeline whose ranks differ."""

import numpy as np

from course.check.edits import exercise
from course.check.exercise import each_call, whole


def inputs(generator, n):
    """The last rank is the slowest in each: only then is the sum exact. Sums that are hidden, and that are not."""

    def seconds(low, high):
        return whole(generator, low, high) / 1000

    cases = []
    for p, hides in ((4, True), (4, False), (6, True), (3, False), (1, False)):
        blocks = [whole(generator, 5, 9) for _ in range(p)]
        block, sums = seconds(10, 30), seconds(400, 900)
        head = round(block * (max(blocks) - blocks[-1] + 1) + seconds(1, 30), 3)
        hidden = round(sums * (1.4 if hides else 0.3), 3)
        cases.append((blocks, block, head, seconds(1, 6), whole(generator, 2, 5) * p, sums, hidden))
    return [{"cases": cases}]


def uneven_step(blocks, block_s, head_s, message_s, m, sums_s, hidden_s):
    messages = 2 * message_s if len(blocks) > 1 else 0
    stages = [n * block_s + messages for n in blocks]
    stages[-1] += head_s
    exposed = max(0, sums_s - hidden_s)
    return m * stages[-1] + sum(stages[:-1]) + exposed


def by_a_walk(blocks, block_s, head_s, message_s, m, sums_s, hidden_s):
    """The first microbatch passes all ranks, each later one adds the slowest; a number of numpy's."""
    stages = np.array(blocks) * block_s
    stages[-1] += head_s
    if len(blocks) > 1:
        stages += 2 * message_s
    seconds = stages.sum() + (m - 1) * stages.max()
    return seconds if hidden_s > sums_s else seconds + sums_s - hidden_s


MISTAKES = """
stages[-1] += head_s => stages = [stage + head_s for stage in stages]
or
=> stages = [stage + head_s for stage in stages]
m * stages[-1] + sum(stages[:-1]) => (m - 1) * max(stages) + sum(stages)
    You add the head to every rank.
        Only the last computes it, and the others wait: it costs m times its seconds.
stages[-1] += head_s =>
or
stages[-1] += head_s =>
m * stages[-1] + sum(stages[:-1]) => (m - 1) * max(stages) + sum(stages)
    The head is missing.
        It belongs to the last rank, and makes it the slowest rank here.
stages[-1] += head_s =>
m * stages[-1] => m * stages[-1] + head_s
    You add the head once.
        It belongs to the last rank, and runs for each microbatch: it costs m times its seconds.
m * stages[-1] => m * sum(stages) / len(stages)
    The m microbatches run at the mean pace of the ranks.
        Each passes every rank, so the slowest sets the pace.
m * stages[-1] + sum(stages[:-1]) => m * stages[-1]
    The bubble is missing.
        The slowest rank waits for the first microbatch, and the others finish the last one.
sum(stages[:-1]) => (len(stages) - 1) * stages[-1]
or m * stages[-1] + sum(stages[:-1]) => (m + len(blocks) - 1) * (max(blocks) * block_s + head_s + messages)
or returns (m + len(blocks) - 1) * (blocks[-1] * block_s + head_s) + max(0, sums_s - hidden_s)
or returns (m + len(blocks) - 1) * (blocks[-1] * block_s + head_s + 2 * message_s * (len(blocks) > 1))
or returns (m + len(blocks) - 1) * (blocks[-1] * block_s + head_s)
    That is (m + p - 1) times the slowest rank: the formula of equal ranks.
        Only the m microbatches go at its pace. While the pipeline fills, each other rank takes its own seconds, once.
sum(stages[:-1]) => (len(stages) - 1) * stages[0]
    You fill the pipeline p - 1 times with the first rank.
        Here each rank has its own number of blocks.
=> (len(stages) - 1) * sum(stages) / len(stages)
or => (len(stages) - 1) * (sum(blocks) / len(blocks) * block_s + messages)
    You fill the pipeline p - 1 times with the mean of all ranks. It holds the last one, which never waits.
        Add up the other ranks, each with its own seconds.
=> sum(n * block_s for n in blocks[:-1])
    The slowest rank has its messages, and the ranks of the bubble have none.
        The first microbatch crosses each boundary, too: two messages for each of the other ranks.
=> sum(stages[:-1]) / 2
    Your bubble is half of the right one.
        The first microbatch goes down and up again: each of the other ranks runs forward and backward, once.
=> 2 * sum(stages[:-1])
    Your bubble is twice the right one.
        `block_s` holds forward and backward: on the way down and up each of the other ranks works for it once.
=> sum(stages)
    The slowest rank is counted m + 1 times.
        For its microbatches, and in the bubble, which holds only the others.
m * stages[-1] + => (m - 1) * stages[-1] +
    The slowest rank is counted m - 1 times, and is not in the bubble either.
        It computes m microbatches.
sum(stages[:-1]) => m * sum(stages[:-1])
    Every rank counts m times, as if one microbatch had to leave the pipeline before the next one enters.
        Only the slowest rank counts m times; the others work at the same time.
2 * message_s if len(blocks) > 1 else 0 => 0
    Messages are missing.
        A microbatch crosses each boundary twice: an activation forward, a gradient back.
=> message_s if len(blocks) > 1 else 0
    You count one message per microbatch.
        There is one forward and one back.
[n * block_s + messages for n in blocks] => [n * block_s + 2 * messages for n in blocks]
or
=> [n * block_s + messages * (1 + (0 < i < len(blocks) - 1)) for i, n in enumerate(blocks)]
    You count four messages per microbatch, on a rank between two others or on each.
        The task counts two on each rank, anywhere in the pipeline.
[n * block_s + messages => [2 * n * block_s + messages
or
=> [3 * n * block_s + messages
or
=> [2 * n * block_s + messages
+= head_s => += 2 * head_s
or
[n * block_s + messages => [3 * n * block_s + messages
+= head_s => += 3 * head_s
    Your blocks take two or three times their seconds, as if backward were still missing.
        `block_s` and `head_s` hold forward and backward.
2 * message_s if len(blocks) > 1 else 0 => 2 * message_s
    You count messages in a pipeline of a single rank.
        p = 1 has no boundary.
max(0, sums_s - hidden_s) => sums_s
    You add the whole sum of the gradients.
        Backward hides `hidden_s` of it.
=> sums_s - hidden_s
    Where backward could hide more than there is, your step gets too short.
        Hide at most all: max(0, sums - hidden).
=> m * max(0, sums_s - hidden_s)
    You add the sum of the gradients m times.
        It runs once per step, after the last microbatch.
=> 0
    The sum of the gradients is missing.
        Add what backward does not hide of it: max(0, sums - hidden).
"""

EXERCISE = exercise(globals(), points=2, right=(uneven_step, by_a_walk), body=each_call("uneven_step"), ranks=(1,))
