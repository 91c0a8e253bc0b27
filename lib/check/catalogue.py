"""All exercises, by their id.

Only who is asked for one by its id reads this file. A rank knows its exercise's body by the path, and so imports one
room instead of all: half of the time of a check.
"""

from __future__ import annotations

from lib.check.choosing import calibration, gigabytes, least_regret, repairs, residuals, uneven
from lib.check.collectives import links, rings
from lib.check.data_parallelism import averages, overlap
from lib.check.exercise import Exercise
from lib.check.fsdp import prefetch, resharding, units
from lib.check.interleaving import interleaved, interleaving_sums
from lib.check.memory import memory_live, memory_sums
from lib.check.one_f_one_b import peaks, turns
from lib.check.pipelines import bubbles, chains, cuts, microbatches, schedules
from lib.check.running import messages, ties
from lib.check.sequence_parallelism import masks, norms, slice_sums, slices
from lib.check.tensor_parallelism import block_sums, heads, pairs, words
from lib.check.three_d import choice, clip_axes, eight_ranks, hang, mesh_groups, whose_sum
from lib.check.zero import sharded_step, sharded_sums, shards
from lib.check.zero_bubble import halves, par

_PARTS = (
    *(memory_sums, memory_live, rings, links, averages, overlap),
    *(shards, sharded_step, sharded_sums, units, prefetch, resharding),
    *(pairs, heads, words, block_sums),
    *(slices, norms, masks, slice_sums),
    *(cuts, chains, schedules, microbatches, bubbles),
    *(turns, peaks, messages, ties),
    *(interleaved, interleaving_sums, halves, par),
    *(mesh_groups, whose_sum, clip_axes, eight_ranks, hang, choice),
    *(uneven, gigabytes, repairs, residuals, calibration, least_regret),
)
EXERCISES: dict[str, Exercise] = {
    e.id: e for e in sorted((e for part in _PARTS for e in part.EXERCISES), key=lambda e: e.id)
}
