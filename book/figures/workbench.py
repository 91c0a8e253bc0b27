"""The schedule workshop with buttons, for a reader with a kernel: type, check, simulate, run on ranks.

The verdicts come from `course.workshop.typed`, and `book.trials.rehearse` runs the schedule: real processes whose
layers sleep. Here are only a text area, three buttons and a bar that says how far a run should be.
"""

from __future__ import annotations

import threading
import time
from html import escape
from typing import Any

from book.figures.schedule import draw_gantt
from book.trials.rehearse import rehearse
from course.workshop.typed import Par, Verdict, workshop

UNIT_S = 0.05  # of a unit of the schedule, while it runs
TICK_S = 0.1


def workbench(text: str, par: Par | None = None) -> Any:
    """A box of ipywidgets: the text, *check*, *simulate* and *run on ranks*, and their results.

    Args:
        text: a schedule to begin with, a line for each rank.

    Raises:
        ImportError: ipywidgets is not installed.
    """
    import ipywidgets

    par = par or Par()
    area = ipywidgets.Textarea(text.strip(), rows=par.num_ranks + 1, layout={"width": "100%"})
    area.style.font_family = "monospace"
    progress = ipywidgets.FloatProgress(max=1.0, layout={"width": "100%", "visibility": "hidden"})
    shown = ipywidgets.HTML()

    def check(_: object = None) -> Verdict:
        verdict = workshop(area.value, par)
        wrong = f"<pre>{escape(verdict.problem)}\n{escape(verdict.advice)}</pre>" if verdict.problem else ""
        shown.value = f"<p><b>{escape(verdict.headline())}</b></p>{wrong}"
        return verdict

    def simulate(_: object = None) -> None:
        verdict = check()
        if verdict.score is not None:
            drawn = draw_gantt(verdict.timeline, title="Simulated", alt=verdict.headline())
            shown.value = verdict._repr_html_() + drawn._repr_html_()

    def run_on_ranks(_: object = None) -> None:
        verdict = check()
        if verdict.score is None:
            return
        with _ProgressOf(progress, verdict.timeline.makespan * UNIT_S):
            measured = rehearse(verdict.schedule, par.costs, UNIT_S)
        said = f"{measured.makespan:.1f} units measured, {verdict.score.time:g} predicted."
        drawn = draw_gantt(measured, predicted=verdict.timeline, title="Run on ranks", alt=said)
        shown.value = f"<p><b>{said}</b></p>{drawn._repr_html_()}"

    buttons = []
    for words, does in (("Check", check), ("Simulate", simulate), ("Run on ranks", run_on_ranks)):
        button = ipywidgets.Button(description=words)
        button.on_click(does)
        buttons.append(button)
    return ipywidgets.VBox([area, ipywidgets.HBox(buttons), progress, shown])


class _ProgressOf:
    """While it is entered, a bar moves towards its end, which it reaches in about so many seconds."""

    def __init__(self, bar: Any, takes_s: float) -> None:
        self._bar, self._takes_s, self._ended = bar, takes_s, threading.Event()

    def __enter__(self) -> None:
        self._bar.value, self._bar.layout.visibility = 0.0, "visible"
        self._thread = threading.Thread(target=self._move, daemon=True)
        self._thread.start()

    def _move(self) -> None:
        began = time.monotonic()
        while not self._ended.wait(TICK_S):
            self._bar.value = min(0.95, (time.monotonic() - began) / self._takes_s)

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._bar.layout.visibility = "hidden"
