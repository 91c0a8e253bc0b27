"""All benchmarks, one after the other. They want a quiet machine; ratios within one run are what counts."""

from benchmarks import (
    calls,
    collectives,
    data_parallel,
    expert_parallel,
    pipeline,
    ranks,
    tensor_parallel,
    three_d,
    where_time_goes,
    zero,
)

if __name__ == "__main__":
    techniques = data_parallel, zero, tensor_parallel, expert_parallel, pipeline, three_d
    for part in (ranks, calls, collectives, *techniques, where_time_goes):
        part.main()
