"""The ± of an answer: from published runs on this GPU and stack that calibrated nothing, or unknown."""

import json
import re
import statistics
from dataclasses import fields, replace

import pytest

from book.published import FSDP_H200, LATER, RUNS, STEPS
from book.published.missed import all_missed, measured_bytes
from book.published.rows import predict, read_rows
from lib.planner import Cluster, Layout4D, Stack, Training, memory_bytes, step_s
from lib.planner.evidence import EVIDENCE, OF_MEMORY, evidence_of, percent, read_evidence
from lib.planner.fp8 import CALIBRATED_IN_8_BIT
from lib.planner.report import report_of_layout
from lib.planner.stacks import CALIBRATED, CALIBRATED_ATTENTION, STACKS
from lib.planner.training import GPUS, PRESET_MODELS, gpu_of, stack_for, stack_of, training_of
from tools import evidence as tool


def run_on(gpu="h100", stack="megatron", **figures):
    cluster = Cluster(replace(GPUS[gpu], **{"network_Bps": 50e9} | figures), 16)
    return Training(PRESET_MODELS["llama3-8b"], cluster, stack_for(stack, gpu), 64)


def test_the_file_is_of_todays_planner_and_rows():
    assert all_missed() == read_evidence(), "make evidence"


def test_a_number_that_changed_is_found(tmp_path, monkeypatch, capsys):
    old = tmp_path / "evidence.json"
    old.write_text(EVIDENCE.read_text(encoding="utf-8").replace('"runs": 17', '"runs": 18'), encoding="utf-8")
    monkeypatch.setattr(tool, "EVIDENCE", old)
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    assert tool.main(["--check"]) and "evidence.json is not of today's planner and rows" in capsys.readouterr().err
    assert not tool.main([]) and not tool.main(["--check"])
    assert old.read_text(encoding="utf-8") == EVIDENCE.read_text(encoding="utf-8")


def test_no_run_that_calibrated_a_constant_is_evidence():
    rows = {row["id"]: row for path in STEPS for row in read_rows(path)}
    calibrating = {*CALIBRATED.values(), *CALIBRATED_IN_8_BIT.values(), *CALIBRATED_ATTENTION.values()}
    calibrating |= {"TT-H100 8B compiled", "TT-H100 8B eager"}
    assert {name for name, row in rows.items() if predict(row).evidence == "calibrated"} == calibrating
    named = {name for of in read_evidence().values() for missed in of.values() for name in missed["calibrating"]}
    assert named == calibrating
    kinds = "seconds", "seconds in FP8"
    counted = sum(of[kind]["runs"] for of in read_evidence().values() for kind in kinds if kind in of)
    assert counted == len(rows) - len(calibrating)
    llama = [predict(row) for row in read_rows(RUNS) if row["stack"] == "llama3"]
    errors = [abs(one.error) for one in llama if one.evidence != "calibrated"]
    assert len(errors) == 2 and min(errors) > 0.002
    assert read_evidence()["llama3, h100"]["seconds"]["median"] == pytest.approx(statistics.median(errors), abs=1e-4)


def test_the_worst_is_of_all_runs_and_the_median_of_layouts():
    rows = [row for row in read_rows(FSDP_H200) if stack_of(row) == "kempner-forge"]
    errors = {row["id"]: abs(step_s(*training_of(row)).total / row["step_s"] - 1) for row in rows}
    held = [abs(memory_bytes(*training_of(row)).total / 2**30 / row["peak_memory_gib"] - 1) for row in rows]
    said = read_evidence()["kempner-forge, h200"]
    assert said["seconds"]["worst"] == pytest.approx(max(errors.values()), abs=1e-4)
    assert said["memory"]["worst"] == pytest.approx(max(held), abs=1e-4)
    of_layout = {}
    for row in rows:
        _, layout = training_of(row)
        key = row["hidden"], layout._replace(dp=0), layout.microbatches(row["global_batch"])
        of_layout.setdefault(key, []).append(errors[row["id"]])
    middle = statistics.median(map(statistics.median, of_layout.values()))
    assert (said["seconds"]["runs"], said["seconds"]["configurations"]) == (15, len(of_layout))
    assert said["seconds"]["median"] == pytest.approx(middle, abs=1e-4)


def test_units_of_peaks():
    later = {row["id"]: row for row in read_rows(LATER)}
    assert measured_bytes(later["TT-H100 8B FP8 cp1"]) == 83.9 * 2**30
    assert measured_bytes(later["TT-H100 8B eager"]) is None, "a range"
    assert measured_bytes(read_rows(FSDP_H200)[0]) == 80.7 * 2**30
    assert gpu_of(later["TT-H100 8B eager"]) == "h100-500w"


SAID = {  # GPU and stack → quantity → words
    ("h100", "megatron"): (
        "seconds",
        r" ± [\d.]+ % \(median of 5 published layouts, 17 runs, on this GPU and stack; ",
    ),
    ("h100", "megatron-lm"): ("seconds", r" ± [\d.]+ % \(median of 5 published layouts, 17 runs"),
    ("a100", "megatron-2021"): (
        "memory",
        r" ± [\d.]+ % \(median of 63 published layouts on this GPU and stack; worst",
    ),
    ("h200", "fsdp-eager"): (
        "seconds",
        r": the error is unknown: no published run on h200 with the stack fsdp-eager",
    ),
    ("rtx4090", "fsdp"): ("seconds", r": the error is unknown: no published run on this card \(rtx4090\)"),
    ("gb300", "megatron"): ("memory", r": the error .* on this card \(gb300\) says its memory"),
    ("h200", "megatron"): ("seconds", r": the error is unknown: no published run on h200 with the stack megatron"),
    ("h100-500w", "fsdp"): (
        "seconds",
        r": the error is unknown: calibrated on its only row \(TT-H100 8B compiled\), no evidence",
    ),
}


@pytest.mark.parametrize(("gpu", "stack"), SAID)
def test_what_is_said(gpu, stack):
    quantity, words = SAID[gpu, stack]
    said = evidence_of(run_on(gpu, stack))[quantity]
    assert re.match(words, str(said)), said
    assert said.plain()["said"] == str(said)


def test_whose_errors_are_said():
    usual = evidence_of(run_on())
    assert evidence_of(run_on(network_Bps=12.5e9, memory_bytes=64e9)) == usual, "the same GPU"
    run = run_on("a100", "fsdp")
    more = replace(run, stack=replace(run.stack, recipe=stack_for("megatron", "a100").recipe))
    assert evidence_of(more)["seconds"] == evidence_of(run)["seconds"], "the same software"
    other = evidence_of(replace(run, stack=replace(run.stack, overlaps_dp=False)))["seconds"]
    assert other.median is None and "on a100 has software with exactly these constants" in str(other)
    unknown = evidence_of(run_on(peak_flops=1e15))["seconds"]
    assert unknown.gpu is None and "no published run on a GPU with these figures" in str(unknown)
    assert {*OF_MEMORY} < {field.name for field in fields(Stack)}


def test_each_gpu_and_stack_finds_itself():
    """Or a stack that differs in the bytes that are kept, and in nothing else."""
    for gpu in GPUS:
        for name in STACKS:
            said = evidence_of(run_on(gpu, name))["seconds"]
            of = read_evidence().get(f"{name}, {gpu}", {}).get("seconds")
            assert said.gpu == gpu and (said.stack == name or not of)
            assert said.runs == of["runs"] if of else True


def test_a_report_has_both(capsys):
    run = run_on()
    report = report_of_layout(run, Layout4D(2, 1, 1, 8, sequence_parallel=True))
    seconds, memory = (evidence_of(run)[quantity] for quantity in ("seconds", "memory"))
    said = str(report).replace("\n  ", " ")
    assert f"{report.answers['step_s']:.2f} s{seconds}" in said
    assert f"{max(place['held']['total'] for place in report.places) / 1e9:.1f} GB{memory}" in said
    assert json.loads(json.dumps(report.errors))["seconds"]["worst"] == seconds.worst


def test_percent():
    assert [percent(part) for part in (0.0001, 0.0113, 0.0446, 0.15, 0.844)] == [
        *("less than 0.1 %", "1.1 %", "4.5 %", "15 %", "84 %"),
    ]
