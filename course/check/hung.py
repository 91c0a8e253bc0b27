"""The report that the runtime prints of a hang, from the calls that ranks wait in: for tasks that show one."""

from __future__ import annotations

from collections.abc import Mapping

from lib.runtime.hang import STILL_S, WAITING, AwaitedCall, View


def hang_report(waits: Mapping[int, AwaitedCall]) -> str:
    """The report in Markdown, where each rank waits in such a call."""
    return f"```text\n{View(dict.fromkeys(waits, WAITING), waits).explain(STILL_S)}\n```"
