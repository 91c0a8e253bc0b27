"""A sick run from its first step to its verdict: its report, its trace, and other layouts of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from course.practise.answers import verdict_on
from course.practise.causes import causes_text
from course.practise.draws import drawn_case, options_text
from course.practise.instruments import Seen, certified, watched
from course.practise.report import OwnReport, report_of
from lib.lab.profile import step_profile
from lib.launch import RunError, run
from lib.planner.plan_report import report_of_plan
from lib.planner.report import Report
from lib.trace import Trace
from lib.train import planned
from lib.training.config import TrainConfig


class PractiseError(RuntimeError):
    """The run cannot be made, or failed; the message says nothing of its sickness."""


@dataclass(frozen=True)
class SickRun:
    """A run with the sickness of a seed, under some layout. It runs once, when something of it is asked for.

    Args:
        seed: that draws the sickness.
        config: the run of `lib.train`.
        twin: whether the same training also runs in one process, to compare with.
    """

    seed: str
    config: TrainConfig
    twin: bool = True

    @classmethod
    def drawn(cls, seed: str) -> SickRun:
        """The run that a seed draws."""
        return cls(seed, drawn_case(seed).config)

    @cached_property
    def ranks(self) -> list[tuple[Seen | None, Seen]]:
        """What each rank saw: of one process, or None without a twin; and of the run."""
        return _in_ranks(watched, self.config.layout.num_ranks, self.config, self.seed, self.twin)

    @cached_property
    def _report(self) -> OwnReport:
        return report_of(self.config, [seen for _, seen in self.ranks], self.ranks[0][0])

    def report(self) -> OwnReport:
        """What one looks at first: a `RunReport`, or without a twin an `OwnReport`."""
        return self._report

    def without_twin(self) -> SickRun:
        """The same run with nothing to compare it with, as most large runs are."""
        return replace(self, twin=False)

    def trace(self) -> Trace:
        """The last step of all ranks beside its plan; its `save` writes a file for ui.perfetto.dev."""
        return step_profile(planned(self.config), [seen.report["profile"] for _, seen in self.ranks])

    def plan(self) -> Report:
        """What the run should send and hold, as `lib.train --plan` says it."""
        return report_of_plan(planned(self.config), ranks_per_node=8)

    def certify(self) -> tuple[float, float, float]:
        """The largest distances of loss, gradient and weight from one process, as `lib.train --certify` measures.

        Raises:
            PractiseError: a run without a twin.
        """
        if not self.twin:
            raise PractiseError("a certificate compares with one process: this run has none")
        return _in_ranks(certified, self.config.layout.num_ranks, self.config, self.seed)[0]

    def under(self, **changed: object) -> SickRun:
        """The same sickness under a different layout, or model: `run.under(dp=1, tp=2)`.

        Raises:
            PractiseError: a run that is impossible, or that practice does not offer.
        """
        known = vars(self.config.layout), vars(self.config.model), vars(self.config)
        layout, model, others = ({name: x for name, x in changed.items() if name in of} for of in known)
        try:
            config = replace(
                self.config,
                layout=replace(self.config.layout, **layout),
                model=replace(self.config.model, **model),
                **others,
            )
        except ValueError as error:
            raise PractiseError(str(error)) from None
        if not self.twin and config.layout.num_ranks == 1:
            raise PractiseError("one rank is the twin: without it, practice runs have at least 2")
        return replace(self, config=offered(config))

    def causes(self) -> str:
        """All that may be wrong with such a run, and how a place is written."""
        return causes_text()

    def answer(self, *named: tuple[str, str]) -> tuple[str, str]:
        """The verdict on one pair (cause, place), or two: `right`, `half right` or `wrong`, and why."""
        return verdict_on(drawn_case(self.seed).sickness, named)

    def __str__(self) -> str:
        losses = self.report().losses
        return f"{options_text(self.config)}\nloss {losses[0]:.3f} in step 1, {losses[-1]:.3f} in step {len(losses)}"


def offered(config: TrainConfig) -> TrainConfig:
    """The same, if practice offers it.

    Raises:
        PractiseError: it does not; the message says why.
    """
    for wrong, why in (
        (config.layout.zero == 3, "zero=3: practice runs have zero=0, 1 or 2"),
        (config.layout.num_ranks > 8, f"{config.layout.num_ranks} ranks: practice runs have at most 8"),
        (config.steps not in range(4, 101), f"steps={config.steps}: practice runs have 4 to 100"),
    ):
        if wrong:
            raise PractiseError(why)
    return config


def _in_ranks(work: Callable, ranks: int, *given: object) -> Sequence:
    try:
        return run(work, ranks, *given, timeout_s=300)
    except RunError as error:
        raise PractiseError(re.sub(r"course/practise/inject\.py.*", "course/practise", str(error))) from None
