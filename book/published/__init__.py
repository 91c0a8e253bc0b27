"""What others have measured and published, with sources: `runs.json`, steps of whole runs; `layouts_a100.json`, tables.

May import `lib.planner` and `lib.cost`, whose predictions are compared with it.
Must never be known by a planner: it would predict what it was given.
"""

from pathlib import Path

RUNS, LAYOUTS, H100_ROWS = (
    Path(__file__).with_name(name) for name in ("runs.json", "layouts_a100.json", "h100.json")
)
