"""Whether an answer is an earlier version, because the last cell that defines it failed.

The problem: after a SyntaxError, a name still has the function of an earlier run, and a check would judge that one.
The idea: IPython announces each cell before and after it runs, in JupyterLab, Colab and VS Code. A name that a cell
defines, and that has the same object before and after, is stale.
"""

from __future__ import annotations

import dis
import re
import symtable
import sys
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from course.check.cells import defined_in

_begun: dict[str, Any] = {}  # name that the cell which now runs defines -> its object so far
_stale: dict[str, tuple[Any, str]] = {}  # name -> its object, error of the last cell that defines it


def _public_name(error: BaseException) -> str:
    """Of its class; that of a cell which is cut short is private on Python 3.13, `_IncompleteInputError`."""
    return next(kind.__name__ for kind in type(error).__mro__ if not kind.__name__.startswith("_"))


def watch_cells(ipython: Any) -> None:
    """From now on, note the cells of this notebook that fail."""

    def begins(info: Any) -> None:
        _begun.clear()
        text = re.sub(r"\A\s*%%(time|capture).*", "", info.raw_cell)
        for name in _defined(text, ipython.transform_cell):
            value = ipython.user_ns.get(name)
            if isinstance(value, (FunctionType, type)):  # others may be large
                _begun[name] = value

    def ends(result: Any) -> None:
        error = result and (result.error_before_exec or result.error_in_exec)
        for name, before in _begun.items():
            # Where a cell `f = g` succeeds, it may be the same function; `%%time` succeeds also after an error.
            is_def = result and re.search(rf"^(async +)?(def|class) +{name}\b", result.info.raw_cell, re.MULTILINE)
            if ipython.user_ns.get(name) is before and (error or result is None or is_def):
                _stale[name] = before, f" ({_public_name(error)})" if error else ""
            else:
                _stale.pop(name, None)

    ipython.events.register("pre_run_cell", begins)
    ipython.events.register("post_run_cell", ends)


def sentence(answer: Callable) -> str:
    """Which cell failed, if the answer or a function that it uses is stale; else ""."""
    used: list[Any] = [answer]
    for function in used:  # the list grows by what this one uses
        for name, (earlier, error) in _stale.items():
            if function is earlier:
                return (
                    f"The last cell that defines {name} failed{error}, so {name} is still the earlier version: "
                    "correct that cell and run it, then check again."
                )
        if isinstance(function, FunctionType) and function.__module__ == "__main__":
            values = [function.__globals__.get(name) for name in _globals(function.__code__)]
            used += [value for value in values if callable(value) and value not in used]
    return ""


def _defined(text: str, as_python: Callable[[str], str]) -> set[str]:
    """The names that a cell gives to something."""
    try:
        names = symtable.symtable(as_python(text), "", "exec").get_symbols()
        return {name.get_name() for name in names if name.is_assigned() or name.is_imported()}
    except (SyntaxError, ValueError):
        return defined_in(text)


def _globals(code: CodeType) -> set[str]:
    inner = (_globals(const) for const in code.co_consts if isinstance(const, CodeType))
    return {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}.union(*inner)


if ipython := "IPython" in sys.modules and sys.modules["IPython"].get_ipython():
    watch_cells(ipython)
