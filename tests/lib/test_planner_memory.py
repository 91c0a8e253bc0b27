"""Bytes of a rank against peaks that were published; whole gradients, units that are gathered, and the vocabulary."""

from dataclasses import replace

import pytest

from lib.cost.sizes import LLAMA, ModelShape
from lib.planner import Cluster, Layout4D, Training, memory_bytes
from lib.planner.training import GPUS, PRESET_MODELS, stack_for

# KempnerForge (benchmarks/mfu_scaling, weak_scaling_160gpu) at 5666d0d: H200, sequences of 4096 tokens, full
# recomputation. It prints GB of 2^30 bytes, `max_memory_allocated` (kempnerforge/metrics/memory.py).
SIZES = {  # width, blocks, heads, width of the MLP
    "7B": (4096, 32, 32, 14_336),
    "13B": (5120, 40, 40, 17_920),
    "70B": (8192, 80, 64, 28_672),
}
PEAKS = {  # model, tp, dp, sequences of a microbatch, microbatches → GiB
    ("7B", 1, 2, 2, 4): 62.4,
    ("7B", 2, 2, 4, 2): 45.9,
    ("7B", 4, 2, 4, 2): 32.7,
    ("7B", 4, 4, 4, 2): 29.4,
    ("13B", 1, 8, 4, 4): 88.5,
    ("13B", 4, 2, 4, 4): 45.1,
    ("13B", 4, 8, 4, 4): 36.3,
    ("13B", 4, 16, 4, 4): 34.8,
    ("70B", 4, 2, 2, 4): 128.5,
    ("70B", 4, 8, 2, 4): 93.2,
    ("70B", 4, 32, 2, 4): 83.6,
}
WITHOUT_FSDP = {("7B", 1, 1, 2, 4): 80.7, ("7B", 2, 1, 4, 2): 57.8}


def forge(name, tp, dp, rows, m, **stack):
    """The training of a row, and its layout."""
    h, blocks, heads, f = SIZES[name]
    model = ModelShape(h, blocks, heads, 128_256, 4096, num_kv_heads=8, d_mlp=f, tied=False, **LLAMA)
    layout = Layout4D(tp, 1, 1, dp, rows, zero=3 if dp > 1 else 0, sequence_parallel=tp > 1, recompute="full")
    of = replace(stack_for("kempner-forge", "h200"), **stack)
    return Training(model, Cluster(GPUS["h200"], tp * dp, 4), of, rows * m * dp), layout


@pytest.mark.parametrize("row", PEAKS, ids=str)
def test_peaks_of_fsdp_with_accumulation(row, say):
    run, layout = forge(*row)
    error = memory_bytes(run, layout).total / 2**30 / PEAKS[row] - 1
    say(f"{row}: {error:+.1%}")
    assert abs(error) < 0.05


def test_each_term_is_needed():
    """Without whole gradients a 70B needs a fifth of its memory; without the whole vocabulary a 13B two thirds."""

    def error(row, **stack):
        return memory_bytes(*forge(*row, **stack)).total / 2**30 / PEAKS[row] - 1

    large, small = ("70B", 4, 32, 2, 4), ("13B", 4, 16, 4, 4)
    assert error(large, whole_gradient_bytes=0) < -0.75 and error(small, whole_gradient_bytes=0) < -0.35
    assert error(large, whole_gradient_bytes=2) < -0.35
    assert error(small, splits_vocabulary=False, logits_bytes=14) > 0.25, "a loss in 16 bit, not in 32"
    assert error(small, splits_vocabulary=True) < -0.3


def test_whole_gradients_are_there_instead_of_shards():
    run, layout = forge("70B", 4, 32, 2, 4)
    each, whole = (
        memory_bytes(replace(run, stack=replace(run.stack, whole_gradient_bytes=n)), layout) for n in (0, 4)
    )
    held = run.model.num_parameters / 4 + 0.75 * run.end_parameters  # the embedding is whole
    assert whole.gradients == pytest.approx(4 * held, rel=1e-4)
    assert each.gradients == pytest.approx(2 * held / 32, rel=1e-4)
    assert whole._replace(gradients=0) == each._replace(gradients=0)


@pytest.mark.parametrize(
    ("zero", "dp", "m", "bytes_per_parameter"),
    [(3, 8, 2, 4), (2, 8, 2, 4), (1, 8, 2, 2), (0, 8, 2, 2), (3, 8, 1, 2 / 8), (2, 8, 1, 2 / 8)],
)
def test_whole_gradients_need_shards_and_two_microbatches(zero, dp, m, bytes_per_parameter):
    run = replace(
        Training(PRESET_MODELS["llama-7b"], Cluster(GPUS["h100"], dp), stack_for("fsdp", "h100"), m * dp),
        stack=replace(stack_for("fsdp", "h100"), whole_gradient_bytes=4),
    )
    found = memory_bytes(run, Layout4D(1, 1, 1, dp, zero=zero))
    assert found.gradients == pytest.approx(bytes_per_parameter * run.model.num_parameters, rel=1e-3)


def test_two_rows_without_fsdp_are_unexplained(say):
    """10.7 and 7.7 GB are missing; a second set of gradients, such as a compiled backward may return, is 16.1, 8.6."""
    for row, gib in WITHOUT_FSDP.items():
        run, layout = forge(*row)
        missing = gib * 2**30 / 1e9 - memory_bytes(run, layout).total / 1e9
        say(f"{row}: unexplained {missing:.1f} GB of {gib * 2**30 / 1e9:.1f}")
        assert 0.11 < missing * 1e9 / 2**30 / gib < 0.13
