"""What others have measured and published, with sources: `runs.json`, steps of whole runs; `layouts_a100.json`, tables;
`later.json`, steps that came after the constants were chosen. And what we measured on one card: `h100.json`;
steps of models with experts: `experts.json`, which `python -m book.published.experts` compares.
`python -m book.published` predicts the steps, and prints the errors.

May import `lib.planner` and `lib.cost`, whose predictions are compared with it.
Must never be known by a planner: it would predict what it was given.
"""

from pathlib import Path

FILES = "runs.json", "layouts_a100.json", "later.json", "h100.json", "experts.json"
RUNS, LAYOUTS, LATER, ONE_H100, EXPERTS = (Path(__file__).with_name(name) for name in FILES)
