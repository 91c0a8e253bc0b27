"""The one room for before it starts: messages, memory, waits and seconds of a run in any layout.

Two predictions. A `Plan` is exact: it goes through the actions of each rank of this library, tensor by tensor. A
`Training` is a run on a distant cluster, with whatever software: memory and seconds of every possible layout, from
formulas.

Letters: d, t, p, c data-, tensor-, pipeline- and context-parallel ranks; v stages per rank; m microbatches of b
sequences; s tokens of a sequence; h width; V vocabulary; Ψ parameters.

May import `lib.cost`, `lib.layout`, `lib.pipeline.balance`, `lib.pipeline.schedules`,
`lib.pipeline.simulate`, `lib.pipeline.lower`, `lib.pipeline.gantt`, and of `lib.model` the type of its sizes. It is
pure Python: a plan for 1024 ranks needs none of them, nor torch.
Must never know an implementation: a plan is compared with a measured run (`tests/lib/test_plan.py`), the formulas with
published runs (`book.published`), with plans, and with a run on this machine.
"""

from lib.planner.memory import fits, memory_bytes
from lib.planner.peak import step_memory
from lib.planner.plan import Plan, step_bubble
from lib.planner.plan_messages import step_traffic
from lib.planner.search import Choices, Planned, best_layouts
from lib.planner.seconds import step_s
from lib.planner.stacks import Stack
from lib.planner.training import Cluster, Layout4D, Training

__all__ = ["Plan", "step_bubble", "step_memory", "step_traffic"]
__all__ += ["Choices", "Cluster", "Layout4D", "Planned", "Stack", "Training"]
__all__ += ["best_layouts", "fits", "memory_bytes", "step_s"]
