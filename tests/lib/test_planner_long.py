"""Published steps of long sequences: one row calibrates the speed of attention, the others say which way it went."""

from dataclasses import replace

import pytest

from book.published import LATER, LONG, RUNS
from book.published.rows import predict, read_rows
from lib.planner import Layout4D, step_s
from lib.planner.evidence import read_evidence
from lib.planner.refusals import refusal
from lib.planner.seconds import step_and_waits
from lib.planner.stacks import CALIBRATED_ATTENTION, STACKS
from lib.planner.training import training_of

ROWS = {row["id"].split()[-1]: row for row in read_rows(LONG)}
CP = [name for name, row in ROWS.items() if row["cp"] > 1]
AT = "128K"  # the row that calibrates


def error_of(row, way="", **changed):
    run, layout = training_of(row)
    run = replace(run, stack=replace(run.stack, **changed))
    return step_s(run, layout._replace(attention=way if layout.cp > 1 else "")).total / row["step_s"] - 1


def share_for(row, way="", **changed):
    """Of the peak, by attention, so that the prediction of a row is exact."""
    low, high = 0.05, 3.0
    for _ in range(50):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if error_of(row, way, attention_share=middle, **changed) > 0 else (low, middle)
    return low


def test_seconds_follow_from_the_printed_flops():
    """The full matrix of attention is counted: the same software's 16,934 tokens/s of 4,096 are its 780 TFLOP/s."""
    for row in ROWS.values():
        run, _ = training_of(row)
        flops = run.utilisation(row["step_s"]) * run.cluster.device.peak_flops
        assert flops / 1e12 == pytest.approx(row["model_tflops_full_attention"], rel=1e-3)
        assert row["gpus"] == row["tp"] * row["pp"] * row["dp"] * row["cp"]
        assert row["seq"] * row["global_batch"] == 4 * 2**20
    run, _ = training_of(ROWS["4K"])
    run = replace(run, cluster=replace(run.cluster, gpus=8), global_batch=128)
    step = 128 * 4096 / 8 / 16_934
    assert run.utilisation(step) * run.cluster.device.peak_flops / 1e12 == pytest.approx(780, abs=0.5)


def test_one_row_calibrates_and_eight_are_evidence(say):
    assert CALIBRATED_ATTENTION["megatron-2024"].endswith(AT)
    assert STACKS["megatron-2024"]["attention_share"] == pytest.approx(share_for(ROWS[AT]), abs=5e-4)
    errors = {name: predict(row).error for name, row in ROWS.items()}
    say(", ".join(f"{name}: {error:+.1%}" for name, error in errors.items()))
    assert abs(errors.pop(AT)) < 1e-3
    assert max(map(abs, errors.values())) < 0.06
    assert max(abs(errors[name]) for name in CP if name != AT) < 0.03, (
        "cp of 2 to 32, 32 thousand to a million tokens"
    )
    said = read_evidence()["megatron-2024, h100"]["seconds in FP8"]
    assert (said["runs"], said["in_view"], said["worst"]) == (8, 0, pytest.approx(max(errors.values()), abs=1e-4))


@pytest.mark.parametrize(
    ("way", "changed"),
    [("gather", {}), ("gather", {"keeps_gathered": True}), ("ring", {"balanced_cp": False})],
    ids=["waits", "waits less", "unbalanced"],
)
def test_it_was_a_ring_that_hides_and_is_balanced(way, changed, say):
    """Any other way, calibrated on the same row, misses another."""
    share = share_for(ROWS[AT], way, **changed)
    errors = {name: error_of(ROWS[name], way, attention_share=share, **changed) for name in ROWS}
    say(", ".join(f"{name}: {error:+.1%}" for name, error in errors.items()))
    assert abs(errors[AT]) < 1e-6 and max(map(abs, errors.values())) > 0.12


def test_these_layouts_leave_ulysses_too_few_heads():
    """Four on a tensor-parallel rank, for 16 and for 32 ranks."""
    for name, can in (("32K", True), ("256K", True), ("512K", False), ("1024K", False)):
        run, layout = training_of(ROWS[name])
        assert (refusal(run, layout._replace(attention="ulysses")) is None) == can, name


def test_llama_3_waits_for_its_gather(say):
    """At 128 thousand tokens. Its paper does not say whether keys and values are kept; it would be 2 % of the step."""
    row = next(row for row in read_rows(RUNS) if row["id"] == "Llama 3 405B 128k tokens")
    errors = {
        "gathered again": error_of(row),
        "kept": error_of(row, keeps_gathered=True),
        "a ring": error_of(row, "ring"),
    }
    say(", ".join(f"{name}: {error:+.1%}" for name, error in errors.items()))
    assert errors["gathered again"] == predict(row).error
    assert errors["a ring"] < errors["kept"] < errors["gathered again"] < 0.03
    assert errors["gathered again"] - errors["kept"] == pytest.approx(0.02, abs=0.01)


def test_rows_of_torchtitan_decide_between_no_ways():
    """Its messages are inside a node, and take less than 1 % of a step."""
    for row in read_rows(LATER):
        if row.get("cp", 1) > 1 and row["stack"] == "titan":
            run, layout = training_of(row)
            seconds, waits = step_and_waits(run, layout)
            assert waits["cp"].messages.seconds < 0.01 * seconds.total
            assert isinstance(layout, Layout4D) and run.stack.cp_attention == "gather"
