"""The report that the runtime prints of a hang, from the calls that ranks wait in: for tasks that show one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lib.runtime.hang import FINISHED, STILL_S, WAITING, AwaitedCall, View


def hang_report(waits: Mapping[int, AwaitedCall], finished: Iterable[int] = ()) -> str:
    """The report in Markdown, where each rank waits in such a call, or has finished."""
    states = dict.fromkeys(waits, WAITING) | dict.fromkeys(finished, FINISHED)
    return f"```text\n{View(dict(sorted(states.items())), waits).explain(STILL_S)}\n```"
