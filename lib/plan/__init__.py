"""What a run in any layout will send and hold, and how long its ranks will wait, before anything starts.

May import `lib.cost`, `lib.pipeline.balance`, `lib.pipeline.schedules`, `lib.pipeline.simulate`, `lib.pipeline.lower`,
`lib.pipeline.gantt`, `lib.layout`, `lib.trace`, and of `lib.model` the type of its sizes. It is pure Python: a plan for
1024 ranks needs none of them, nor torch.
Must never know how anything is done: `tests/test_plan.py` holds every number against a run that was measured.
"""

from lib.plan.memory import step_memory
from lib.plan.plan import Plan, step_bubble
from lib.plan.traffic import step_traffic

__all__ = ["Plan", "step_bubble", "step_memory", "step_traffic"]
