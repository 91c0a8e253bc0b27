"""What others have measured and published, with sources: `runs.json`, steps of whole runs; `layouts_a100.json`, tables;
`later.json`, steps that came after the constants were chosen; `fsdp_h200.json`, steps and peaks of memory of FSDP;
`fp8.json`, steps with matmuls in 8 bit; `long.json`, steps of one model with sequences of 4 thousand to a million
tokens; `scale.json`, throughput on more and more GPUs, of models whose sizes are not published; `experts.json`, steps
of models with experts, which `python -m book.published.experts` compares. And what we measured on one card:
`h100.json`. `python -m book.published` predicts the steps, and prints the errors.

May import `lib.planner` and `lib.cost`, whose predictions are compared with it.
Must never be known by a planner: it would predict what it was given.
"""

from pathlib import Path

FILES = "runs layouts_a100 later h100 fsdp_h200 fp8 long scale experts".split()
RUNS, LAYOUTS, LATER, ONE_H100, FSDP_H200, FP8, LONG, SCALE, EXPERTS = (
    Path(__file__).with_name(f"{name}.json") for name in FILES
)
STEPS = RUNS, LATER, FSDP_H200, FP8, LONG  # what has rows of runs: `book.published.rows.read_rows`
