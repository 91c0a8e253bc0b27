"""Fits, tight, or does not fit: the published layouts behind it, what turns it, and what the search proposes."""

from collections import Counter
from dataclasses import replace

import pytest

from book.published.layouts import read_tables
from lib.planner import Choices, Cluster, Layout4D, Training, best_layouts, memory_bytes, step_s
from lib.planner.margin import RAN_AT_FILL, memory_verdict, ran_text, verdict_text
from lib.planner.report import report_of_layout
from lib.planner.report_search import others_text
from lib.planner.search import Planned, all_layouts
from lib.planner.stacks import STACKS, stack_name
from lib.planner.training import GPUS, PRESET_MODELS, stack_for


def training(model="llama-70b", gpus=64, stack="megatron", batch=1024):
    return Training(PRESET_MODELS[model], Cluster(GPUS["h100"], gpus), stack_for(stack, "h100"), batch)


def test_the_published_layouts_are_counted_again():
    ran, tried = Counter(), Counter()
    for cell in (cell for table in read_tables().values() for cell in table):
        percent = 100 * memory_bytes(cell.training, cell.layout).total / cell.training.room_bytes
        start = max(start for start in RAN_AT_FILL if start <= percent)
        tried[start] += 1
        ran[start] += cell.measured_s is not None
    assert {start: (ran[start], tried[start]) for start in RAN_AT_FILL} == RAN_AT_FILL


@pytest.mark.parametrize(
    ("gb", "word", "said"),
    [
        (10, "fits", "below 80% of the memory (A100), 228 ran: 93%"),
        (71.9, "fits", "of 46 published layouts planned at 80 to 90% of the memory (A100), 30 ran: 65%"),
        (77.6, "tight", "of 31 published layouts planned at 90 to 100% of the memory (A100), 15 ran: 48%"),
        (80, "tight", "of 399"),
        (80.1, "does not fit", "of 399 published layouts planned above 100% of the memory (A100), 12 ran: 3%"),
    ],
)
def test_three_values(gb, word, said):
    assert memory_verdict(gb * 1e9, 80e9) == word and said in ran_text(gb * 1e9, 80e9)
    assert memory_verdict(gb * 1e9, 80e9, 0) == ("does not fit" if gb > 80 else "fits")


def test_no_tight_layout_is_recommended_if_another_exists():
    run = training()
    found = best_layouts(run, Choices(), best=10_000)
    is_tight = [one.memory.total > 72e9 for one in found]
    assert any(is_tight) and is_tight == sorted(is_tight)
    without = best_layouts(run, Choices(headroom=0))[0]
    assert without.memory.total > 72e9 and without.seconds.total < found[0].seconds.total
    for count in (is_tight.count(False), is_tight.count(True)):
        part = [one.seconds.total for one in (found[:count] if count == is_tight.count(False) else found[-count:])]
        assert part == sorted(part)
    few = replace(run, cluster=Cluster(replace(GPUS["h100"], memory_bytes=1.02 * smallest(run)), 64))
    assert all(one.memory.total > 0.9 * few.room_bytes for one in best_layouts(few)), "nothing else fits"


def test_recomputation_is_tried_where_a_layout_without_is_tight():
    run = training()
    found = {one.layout for one in best_layouts(run, best=10_000)}
    plain = [one._replace(recompute="none") for one in found if one.recompute == "full"]
    assert any(0.9 < memory_bytes(run, one).total / run.room_bytes <= 1 for one in plain)


def smallest(run):
    return min(memory_bytes(run, layout).total for layout in all_layouts(run, Choices()))


@pytest.mark.parametrize(
    ("microbatch", "stack", "said"),
    [
        (1, "megatron", "GB with 14 bytes per parameter (megatron); with 18 (megatron-lm) "),
        (
            1,
            "megatron-lm",
            "does not fit: 91.1 of 80.0 GB with 18 bytes per parameter (megatron-lm); with 16 (fsdp) ",
        ),
        (8, "megatron", "; the same with 8 to 18, which the stacks keep"),
    ],
)
def test_the_stack_is_in_the_verdict_and_what_turns_it(microbatch, stack, said):
    run, layout = training("qwen3-32b", 16, stack), Layout4D(4, 1, 1, 4, microbatch, sequence_parallel=True)
    text = verdict_text(run, layout)
    assert said in text
    if "; with " in text:
        turned = text.split("; with ")[1]
        other = next(name for name in STACKS if f"({name})" in turned)
        there = memory_bytes(replace(run, stack=replace(run.stack, recipe=stack_for(other, "h100").recipe)), layout)
        assert f") {there.total / 1e9:.1f}: {memory_verdict(there.total, 80e9)}" in turned
        assert memory_verdict(there.total, 80e9) != text.split(":")[0]


def test_a_stack_is_known_by_its_settings():
    for gpu in ("a100", "h100", "b200"):
        assert [stack_name(stack_for(name, gpu)) for name in STACKS] == list(STACKS)
    assert stack_name(replace(stack_for("fsdp", "h100"), whole_gradient_bytes=4)) == ""


def test_one_that_does_not_fit_is_never_as_fast_as_the_fastest():
    run = training()
    best = best_layouts(run)[0]
    large = best._replace(memory=best.memory._replace(logits=90e9))
    quick = best._replace(
        seconds=best.seconds._replace(matmuls=1), memory=best.memory._replace(logits=75e9 - best.memory.total)
    )
    said = [others_text([best], mine, "", 80e9, 0.1).splitlines()[-1] for mine in (best, large, quick)]
    assert said[0] == "yours is as fast as the fastest that was found"
    assert said[1] == "yours does not fit, so its seconds are compared with none"
    assert "faster, and tight" in said[2]


def test_the_report_has_both_sentences_and_the_headroom():
    run, layout = training("qwen3-32b", 16), Layout4D(4, 1, 1, 4, sequence_parallel=True)
    planned = Planned(layout, step_s(run, layout), memory_bytes(run, layout))
    notes = report_of_layout(run, layout).notes
    assert notes[0].startswith("fits: 70.6 of 80.0 GB") and "30 ran: 65%" in notes[1]
    assert report_of_layout(run, layout, headroom=0.2).notes[0].startswith("tight: 70.6")
    assert ", tight" in others_text([planned], None, "", 80e9, 0.2)
    assert ", tight" not in others_text([planned], None, "", 80e9, 0.1)
