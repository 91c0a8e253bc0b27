"""Layouts for a model on a distant cluster: memory and seconds of every possible layout, from formulas.

May import `lib.cost`, `lib.layout` for its checks, and `lib.plan` for the form of its tables. It is pure Python.
Must never know ranks: its predictions are compared with published runs (`lib.planner.rows`), with `lib.plan`, and with
a run on this machine.
"""

from lib.planner.memory import memory_bytes
from lib.planner.search import Choices, Planned, best_layouts
from lib.planner.seconds import step_s
from lib.planner.training import Cluster, Layout4D, Stack, Training

__all__ = ["Choices", "Cluster", "Training", "Layout4D", "Planned", "Stack", "memory_bytes", "best_layouts", "step_s"]
