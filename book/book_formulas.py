"""The formula sheet: beneath each formula, the function that computes it and what it gives while the page is built.

A page says `{computed}` with a call, such as `cost.wire_bytes("all_reduce", payload_bytes=1e9, n=8)`. The result gets
its unit from the function's name, and the page says which chapters call the same function. Where it is a property's,
`:of: Class` says of what.
"""

import ast
import math
import re
from importlib import import_module

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.parsers.rst.directives import unchanged
from live_page import ROOT
from sphinx.addnodes import pending_xref

MODULES = {  # what a call may name
    "cost": "lib.cost",
    "bubble": "lib.cost.bubble",
    "sizes": "lib.cost.sizes",
    "experts": "lib.cost.experts",
    "expert_models": "lib.cost.expert_models",
    "hardware": "lib.cost.hardware",
    "saved": "book.trials.saved",
    "exposed": "book.trials.exposed",
}
PREFIXES = {
    "B": [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (0, "")],
    "s": [(1, ""), (1e-3, "m"), (1e-6, "µ"), (0, "n")],
}
SPANS = [(365 * 86400, "years"), (86400, "days"), (3600, "hours")]
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def digits(x: float) -> str:
    """Four digits that count, without an exponent: 1.75, 0.0082, 140."""
    return f"{float(f'{x:.4g}'):,.10f}".rstrip("0").rstrip(".").replace(",", "\u2009")


def quantity(x: float, name: str) -> str:
    """A result as a reader would say it, with the unit that the function's name ends in."""
    if name.endswith("_flops") or (not name.endswith(("_bytes", "_s")) and abs(x) >= 1e9):
        exponent = math.floor(math.log10(x))
        power = f"{digits(x / 10**exponent)} × 10{str(exponent).translate(SUPERSCRIPTS)}"
        return f"{power} FLOP" if name.endswith("_flops") else power
    if not name.endswith(("_bytes", "_s")):
        return digits(x)
    unit = "B" if name.endswith("_bytes") else "s"
    for seconds, word in SPANS if unit == "s" else []:
        if x >= seconds:
            return f"{digits(x / seconds)} {word}"
    size, prefix = next(step for step in PREFIXES[unit] if abs(x) >= step[0])
    return f"{digits(x / (size or (1 if unit == 'B' else 1e-9)))} {prefix if x else ''}{unit}"


def said(result: object, name: str) -> str:
    if isinstance(result, str):
        return result
    if isinstance(result, dict):
        return ", ".join(f"{key} {said(value, name)}" for key, value in result.items())
    if isinstance(result, list | tuple):
        return ", ".join(
            f"({said(item, name)})" if isinstance(item, list | tuple) else said(item, name) for item in result
        )
    return quantity(result, name)


def compute(call: str) -> tuple[str, str, object]:
    """(module, name, result) of an expression like `cost.name(...)` or `cost.TABLE["7B"].name`.

    Raises:
        ValueError: it does not begin with a module that a formula may come from.
    """
    match = re.match(r"(\w+)\.", call)
    if match is None or match[1] not in MODULES:
        raise ValueError(f"{{computed}} {call}: begin with one of {', '.join(MODULES)}, such as cost.wire_bytes(...)")
    tree = ast.parse(call, mode="eval").body
    name = (tree.func if isinstance(tree, ast.Call) else tree).attr
    return match[1], name, eval(call, {module: import_module(path) for module, path in MODULES.items()})


def chapters_that_call(module: str, name: str, of: str | None) -> list[str]:
    used = re.compile(rf"\.{name}\b(?!\()" if of else rf"\b{module}\.{name}\(")
    sources = sorted(ROOT.glob("chapters/*.md"))
    return [f"chapters/{path.stem}" for path in sources if used.search(path.read_text(encoding="utf-8"))]


class Computed(Directive):
    required_arguments = 1
    final_argument_whitespace = True
    option_spec = {"of": unchanged}

    def run(self):
        env = self.state.document.settings.env
        call, of = " ".join(self.arguments[0].split()), self.options.get("of")
        module, name, result = compute(call)
        for used in sorted(ROOT.glob("lib/cost/*.py")) + sorted(ROOT.glob("book/trials/*.py")):
            env.note_dependency(str(used))
        home = getattr(getattr(import_module(MODULES[module]), of or name, None), "__module__", MODULES[module])
        number = nodes.paragraph("", "", nodes.literal("", call), nodes.Text(" = "), classes=["number"])
        number += nodes.strong("", said(result, name))
        here = {"refdoc": env.docname, "refwarn": True, "refexplicit": True}
        to_code = pending_xref("", refdomain="py", reftype="obj", reftarget=f"{home}.{of or name}", **here)
        to_code += nodes.literal("", ".".join(filter(None, (home, of, name))))
        where = nodes.paragraph("", "", to_code, classes=["where"])
        for chapter in chapters_that_call(module, name, of):
            if chapter in env.found_docs:
                to_chapter = pending_xref("", refdomain="std", reftype="doc", reftarget=f"/{chapter}", **here)
                to_chapter["refexplicit"] = False  # its text is the chapter's title
                to_chapter += nodes.inline("", chapter)
                where += [nodes.Text(" · "), to_chapter]
        return [nodes.container("", number, where, classes=["computed"])]


def setup(app):
    app.add_directive("computed", Computed)
    return {"version": "1", "parallel_read_safe": True}
