"""Slips that need no list: the solution with a factor, a mean for a sum, a sum for a mean, the first or last forgotten.

The problem: a check that compares some numbers may not see a slip. An optimizer that divides by the size of a gradient
does not feel a factor, and where the last gradient is zero, it can be forgotten.
The idea: each slip is put into the text of the solution, wherever it can be. The check must fail on every mutant, or
the exercise lists it in `EQUIVALENT`, with the reason why it does the same.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from difflib import SequenceMatcher

from course.check.edits import Edited

FACTORS = (2, 100)
FORGOTTEN = {"the first": "[1:]", "the last": "[:-1]"}
COLLECTIVES = "all_reduce reduce_scatter all_gather broadcast reduce all_to_all all_to_all_rows recv".split()
MEANS = {"sum": "mean", "mean": "sum"}
SIZES = ("size", "get_world_size", "n", "world_size", "ranks")  # a division by one of them makes a mean
NOT_DATA = ("group", "self", "model", "mesh")  # arguments without a first and a last
_Change = tuple[ast.AST, str]  # a node, and its new text, in which {} is the old one


def mutants(solution: Edited) -> Iterator[tuple[str, Edited]]:
    """What each slip is, and the program with it."""
    text, seen = solution.text, {solution.text}
    for what, changes in _slips(ast.parse(text)):
        changed = _rewritten(text, changes)
        if changed not in seen and _parses(changed):
            seen.add(changed)
            yield what, replace(solution, text=changed)
    (program,) = [d for d in ast.parse(text).body if getattr(d, "name", "") == solution.expression]
    if isinstance(program, ast.FunctionDef):
        yield from _of_arguments(solution, program)


def _of_arguments(solution: Edited, program: ast.FunctionDef) -> Iterator[tuple[str, Edited]]:
    """The solution, called without the first or the last of one of its arguments."""
    names = [argument.arg for argument in (*program.args.posonlyargs, *program.args.args)]
    for k, name in enumerate(names):
        if name in NOT_DATA:
            continue
        for what, rest in FORGOTTEN.items():
            given = [*names[:k], name + rest, *names[k + 1 :]]
            call = f"lambda {', '.join(names)}: {solution.expression}({', '.join(given)})"
            yield f"{what} of {name} forgotten", replace(solution, text="", expression=call)


def written(mutant: Edited, solution: Edited) -> str:
    """The mutant as a line, or lines, of a list in the form of `course.check.edits`."""
    if not mutant.text:
        return mutant.expression
    old, new = solution.text.splitlines(), mutant.text.splitlines()
    edits = []
    for tag, i, j, k, m in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal":
            for before, after in zip(old[i:j], new[k:m], strict=True):
                edits.append(f"{before.strip()} => {after.strip()}")
    return "\n".join(edits)


def _slips(tree: ast.AST) -> Iterator[tuple[str, list[_Change]]]:
    for node, parents in _walk(tree):
        inside = parents[-1]
        if _is_scaled(node, inside):
            for factor in FACTORS:
                yield f"{factor} times", [(node, f"({factor} * ({{}}))")]
        if isinstance(node, ast.Constant) and isinstance(inside, ast.BinOp) and type(node.value) in (int, float):
            if node.value > 1:
                yield "a number too small", [(node, f"{_a_tenth_less(node.value):g}")]
        if isinstance(node, ast.Call):
            yield from _of_call(node, inside)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and _name(node.right) in SIZES:
            yield "a sum for a mean", [(node, f"({ast.unparse(node.left)})")]
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div) and _name(node.value) in SIZES:
            yield "a sum for a mean", [(node.value, "1")]
        if isinstance(node, (ast.For, ast.comprehension)):
            for what, rest in FORGOTTEN.items():
                yield f"{what} forgotten", [(node.iter, f"[*({{}})]{rest}")]


def _a_tenth_less(number: float) -> float:
    """Of a whole number, a whole number: at least 1 less."""
    if number == int(number):
        return number - max(1, number // 10)
    return number - number / 10


def _of_call(node: ast.Call, inside: ast.AST) -> Iterator[tuple[str, list[_Change]]]:
    """Slips of a call, which may be a collective, a sum or a mean, or the beginning of backward."""
    name = _name(node.func)
    in_place = _name(getattr(node.func, "value", None)) == "dist"
    reduces = name.removesuffix("_start") in COLLECTIVES and node.args
    op = next((k.value for k in node.keywords if k.arg in ("op", "reduction")), None)
    if reduces and (in_place or name.endswith("_start")):
        for factor in FACTORS:
            if not in_place:
                yield f"{factor} times", [(node.args[0], f"({factor} * ({{}}))")]
            elif name == "all_reduce":
                yield f"{factor} times", [(node.args[0], f"({{}}).mul_({factor})")]
            elif isinstance(inside, ast.Expr) and name != "all_gather":
                yield f"{factor} times", [(node, f"{{}}; ({ast.unparse(node.args[0])}).mul_({factor})")]
    if name == "backward" and isinstance(node.func, ast.Attribute):
        for factor in FACTORS:
            yield f"{factor} times", [(node.func.value, f"({factor} * ({{}}))")]
    if isinstance(op, ast.Constant) and op.value in MEANS:
        yield f"a {MEANS[op.value]} for a {op.value}", [(op, f'"{MEANS[op.value]}"')]
    elif reduces and name.removesuffix("_start") in ("all_reduce", "reduce_scatter"):
        if in_place and name == "all_reduce":
            yield "a mean for a sum", [(node.args[0], "({}).div_(dist.get_world_size())")]
        elif not in_place:
            yield "a mean for a sum", [(node.args[-1], '{}, op="mean"')]
    elif name in MEANS and isinstance(node.func, ast.Attribute):
        old, new = ast.unparse(node.func), f"{ast.unparse(node.func.value)}.{MEANS[name]}"
        yield f"a {MEANS[name]} for a {name}", [(node.func, new)] if old != new else []
    elif name == "sum" and len(node.args) == 1:
        yield "a mean for a sum", [(node, f"(lambda xs: sum(xs) / len(xs))([*({ast.unparse(node.args[0])})])")]


def _is_scaled(node: ast.AST, inside: ast.AST) -> bool:
    """Whether this is a value that a slip multiplies: a result, a product, a sum, or what a collective returns."""
    if not isinstance(node, ast.expr) or isinstance(node, (ast.Tuple, ast.Dict, ast.List)):
        return False
    if isinstance(getattr(node, "value", None), (str, bool)):
        return False
    if isinstance(inside, ast.Return):
        truth = (ast.Compare, ast.BoolOp)
        return not isinstance(node, truth) and not (isinstance(node, ast.Constant) and node.value is None)
    if isinstance(node, ast.BinOp):
        arithmetic = isinstance(node.op, (ast.Mult, ast.Div, ast.Add, ast.Sub, ast.FloorDiv))
        joins = any(isinstance(x, (ast.List, ast.ListComp, ast.Tuple)) for x in (node.left, node.right))
        return arithmetic and not joins and not isinstance(inside, (ast.BinOp, ast.Slice, ast.Subscript))
    if isinstance(node, ast.Call) and not isinstance(inside, ast.Expr):
        of_dist = _name(getattr(node.func, "value", None)) == "dist"
        return not of_dist and _name(node.func) in (*COLLECTIVES, "sum", "mean", "wait")
    return False


def _walk(tree: ast.AST, parents: tuple[ast.AST, ...] = ()) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    """Each node whose text can be replaced, with the nodes around it."""
    for name, field in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(tree, ast.Call):
            continue
        for node in field if isinstance(field, list) else [field]:
            if isinstance(node, ast.AST) and not isinstance(node, ast.JoinedStr):
                around = (*parents, tree)
                # The results of a `return a, b` are each a result.
                if isinstance(tree, (ast.Tuple, ast.Dict)) and parents and isinstance(parents[-1], ast.Return):
                    around = (*parents[:-1], parents[-1])
                yield node, around
                yield from _walk(node, around)


def _name(node: ast.AST | None) -> str:
    """The last name of `a.b` or `a.b()`, or ""."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    return getattr(node, "attr", getattr(node, "id", ""))


def _rewritten(text: str, changes: list[_Change]) -> str:
    lines = text.encode().splitlines(keepends=True)
    begins = [sum(map(len, lines[:k])) for k in range(len(lines))]
    whole = b"".join(lines)
    for node, new in changes:
        start = begins[node.lineno - 1] + node.col_offset
        end = begins[node.end_lineno - 1] + node.end_col_offset
        old = whole[start:end].decode()
        whole = whole[:start] + new.replace("{}", old, 1).encode() + whole[end:]
    return whole.decode()


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True
