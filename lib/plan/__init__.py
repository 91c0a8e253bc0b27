"""Messages, memory and waits of a run in any layout, before it starts.

May import `lib.cost`, `lib.pipeline.balance`, `lib.pipeline.schedules`, `lib.pipeline.simulate`, `lib.pipeline.lower`,
`lib.pipeline.gantt`, `lib.layout`, `lib.trace`, and of `lib.model` the type of its sizes. It is pure Python: a plan for
1024 ranks needs none of them, nor torch.
Must never know an implementation: `tests/lib/test_plan.py` compares every number with a measured run.
"""

from lib.plan.memory import step_memory
from lib.plan.plan import Plan, step_bubble
from lib.plan.traffic import step_traffic

__all__ = ["Plan", "step_bubble", "step_memory", "step_traffic"]
