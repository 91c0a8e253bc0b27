"""Rows of published runs: what is read of them, and in which words a row is refused."""

import json
import statistics

import pytest

from book.published import FP8, FSDP_H200, SCALE, STEPS
from book.published.rows import NEEDED, predict, read_rows
from lib.cost.sizes import Recipe
from lib.planner.training import GPUS, recipe_of, stack_of, training_of

H200 = {row["id"]: row for row in read_rows(FSDP_H200)}
IN_8_BIT = {row["id"]: row for row in read_rows(FP8)}
ROW = H200["KF 70B, tp 4, FSDP 2 (2026-06)"]


def test_every_row_has_a_source_and_a_name_of_its_own():
    rows = [row for path in STEPS for row in read_rows(path)]
    assert len(rows) == 186 + 8 + 15 + 14 + 9 and len({row["id"] for row in rows}) == len(rows)
    assert all(row["source"] and {*NEEDED} <= row.keys() for row in rows)
    assert json.loads(SCALE.read_text(encoding="utf-8"))["rows"][0]["relative"][-1] == 0.39


def test_a_row_of_fsdp():
    run, layout = training_of(ROW)
    assert run.cluster.per_node == 4 and run.cluster.device == GPUS["h200"]
    assert run.stack.recipe == Recipe(2, 2, 0, 4) and stack_of(ROW) == "kempner-forge"
    assert layout[:6] == (4, 1, 1, 2, 2, 1)
    assert layout.zero == 3 and layout.sequence_parallel and layout.recompute == "full"
    assert layout.microbatches(run.global_batch) == 4
    eager = H200["KF 13B, FSDP 8, eager"]
    assert not eager["compile"] and training_of(eager)[0].stack.traffic == 1, "of KempnerForge there is one stack"
    assert stack_of(H200["KF 7B, 1 GPU"]) == "kempner-forge", "its software also where nothing is sharded"
    slow, fast = (training_of(ROW | {"network_GBps": speed})[0].cluster.device.network_Bps for speed in (25, 100))
    assert (slow, fast) == (25e9, 100e9)


def test_a_row_of_megatron_in_8_bit():
    row = IN_8_BIT["FP8 GB200 Llama 3 405B"]
    run, layout = training_of(row)
    assert row["step_s"] == pytest.approx(1536 * 8192 / 256 / 813)
    assert run.cluster.per_node == 64 and run.cluster.device.memory_bytes == 186e9
    assert (layout.stages_per_rank, layout.sequence_parallel, stack_of(row)) == (4, True, "megatron")
    assert not training_of(IN_8_BIT["FP8 H100 GPT-3 5B"])[0].model.dropout_masks
    bare = {name: value for name, value in IN_8_BIT["FP8 H100 GPT-3 5B"].items() if name not in ("flash", "stack")}
    assert stack_of(bare) == "megatron" and not training_of(bare)[0].model.dropout_masks
    assert stack_of({"zero": 0, "compile": True}) == "fsdp" and stack_of({"zero": 0}) == "megatron-2021"
    assert stack_of(IN_8_BIT["FP8 H100 Llama 3 8B, FSDP (25.11)"]) == "megatron", "ZeRO-3 of Megatron"


@pytest.mark.parametrize(
    ("words", "recipe"),
    {
        "AdamW in bf16: 2+2+4 bytes": (2, 2, 0, 4),
        "2+4+4+8": (2, 4, 4, 8),
        "Adam, 2+2+2+8 bytes": (2, 2, 2, 8),
    }.items(),
)
def test_bytes_of_an_optimizer_in_words(words, recipe):
    assert recipe_of(words) == Recipe(*recipe)


def test_bad_rows_are_refused_in_a_sentence(tmp_path):
    path = tmp_path / "rows.json"

    def refused(rows):
        path.write_text(json.dumps(rows), encoding="utf-8")
        with pytest.raises(ValueError, match=r".") as error:
            [predict(row) for row in read_rows(path)]
        return str(error.value)

    assert "has a batch of 16, and 3 times 4 sequences" in refused([ROW | {"accumulation": 3}])
    assert "needs its bytes per parameter: 2+2+4" in refused([ROW | {"optimizer": "AdamW"}])
    assert "lacks gpus" in refused({"rows": [{name: ROW[name] for name in ROW if name != "gpus"}]})
    assert "lacks step_s" in refused([{name: ROW[name] for name in ROW if name != "step_s"}])
    assert "must be a list of runs" in refused({"source": "a page"})
    assert "8 of gh200 are on several nodes: give network_GBps" in refused(
        [{name: ROW[name] for name in ROW if name != "network_GBps"} | {"gpu": "GH200"}]
    )
    assert "GPU 'mi100' is not a preset" in refused([ROW | {"gpu": "MI100"}])


def test_the_network_of_the_rows_of_fsdp_is_assumed(say):
    """Its source does not state it: the errors with half and with twice the 50 GB/s that are assumed."""
    errors, seconds = {}, {}
    for speed in (25, 50, 100):
        found = [predict(row | {"network_GBps": speed}) for row in H200.values()]
        errors[speed] = statistics.median(abs(one.error) for one in found)
        seconds[speed] = [one.seconds.total for one in found]
        say(f"{speed} GB/s per GPU: median error {errors[speed]:.1%} of {len(found)} rows")
    assert all(a >= b >= c for a, b, c in zip(*seconds.values(), strict=True))
    assert errors[50] < 0.1
