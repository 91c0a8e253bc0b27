"""Which layout for a model on a cluster that is not here: memory and seconds of every one that can be, by formulas.

May import `lib.cost`, `lib.layout` for what it refuses, and `lib.plan` for the form of its tables. It is pure Python.
Must never know ranks: what it says is compared with what others have published (`lib.planner.rows`), and with what
`lib.plan` and a run on this machine say.
"""

from lib.planner.memory import memory_bytes
from lib.planner.search import Choices, Planned, best_layouts
from lib.planner.seconds import step_s
from lib.planner.training import Cluster, Layout4D, Stack, Training

__all__ = ["Choices", "Cluster", "Training", "Layout4D", "Planned", "Stack", "memory_bytes", "best_layouts", "step_s"]
