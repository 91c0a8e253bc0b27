"""A statement of a notebook: the names that it gives, fills and needs, and whether it is read in any case.

The problem: to run all of a notebook would take its time, print, and fail where a file or a group is missing; but an
answer may need a table that a loop fills. The idea: definitions are always read. Any other statement is run if the
answer needs a name that this statement gives or fills.
"""

from __future__ import annotations

import ast
import dis
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import CodeType

# With constants in them, calls of these are constants: `torch.tensor([1, 2])`, `float("inf")`.
_KNOWN = {*"np numpy torch math float int complex bool str list tuple dict set range".split()}
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
_NO_CODE = (SyntaxError, ValueError, RecursionError, MemoryError)
_OWN_NAMES = (*_DEFINITIONS, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True)
class Statement:
    """One statement at the top of a cell.

    Args:
        title: of its cell.
        node: the statement.
    """

    title: str
    node: ast.stmt

    @property
    def where(self) -> str:
        """Its cell and line."""
        return f"{self.title}, line {self.node.lineno}"

    @cached_property
    def code(self) -> CodeType:
        """Raises SyntaxError where it is not allowed at the top, as `return` is not."""
        node = ast.Module([self.node], [])
        return compile(node, self.title, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)

    @property
    def is_import(self) -> bool:
        """Whether it imports."""
        return isinstance(self.node, _IMPORTS)

    @property
    def is_function(self) -> bool:
        """Whether it is a `def` or a `class`."""
        return isinstance(self.node, _DEFINITIONS)

    @property
    def is_definition(self) -> bool:
        """An import, a function, a class, or what gets a constant, a function or `partial` of one."""
        if isinstance(self.node, (ast.Assign, ast.AnnAssign)):
            value = self.node.value
            return isinstance(value, ast.Lambda) or _is_constant(value) or _is_other_name(value)
        return isinstance(self.node, (*_DEFINITIONS, *_IMPORTS))

    @cached_property
    def gives(self) -> set[str]:
        """The names that it binds at the top."""
        found: set[str] = set()
        for node in _at_top(self.node):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.alias):
                found.add(node.asname or node.name.partition(".")[0])
            elif isinstance(name := getattr(node, "name", None), str) and not isinstance(node, ast.alias):
                found.add(name)  # of a function or class, of `except ... as`, of a pattern of `match`
        return found

    @cached_property
    def fills(self) -> set[str]:
        """The names whose objects it may change: `x[0] = 1`, `x.y = 1`, `x += [1]`, `x.append(1)`, `setattr`."""
        found: set[str] = set()
        for node in _at_top(self.node):
            if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, (ast.Store, ast.Del)):
                found.add(_root(node))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                found.add(_root(node.func))
            elif isinstance(node, ast.Call) and node.args and getattr(node.func, "id", "") == "setattr":
                found.add(_root(node.args[0]))
            elif isinstance(node, ast.AugAssign):
                found.add(_root(node.target))
        return found - {""}

    @property
    def calls(self) -> set[str]:
        """The names that it calls."""
        called = (node.func for node in _at_top(self.node) if isinstance(node, ast.Call))
        return {func.id for func in called if isinstance(func, ast.Name)}

    @property
    def passes(self) -> set[str]:
        """The names that a line passes to a function."""
        if not isinstance(self.node, ast.Expr) or not isinstance(self.node.value, ast.Call):
            return set()
        call = self.node.value
        given = [*call.args, *(word.value for word in call.keywords)]
        return {one.id for one in given if isinstance(one, ast.Name)}

    @property
    def sets(self) -> set[str]:
        """The names of the notebook that the body of this function sets, by `global`."""
        nodes = ast.walk(self.node) if self.is_function else ()
        return {name for node in nodes if isinstance(node, ast.Global) for name in node.names}

    @property
    def has_stub(self) -> bool:
        """Whether it still has the line that a learner replaces."""
        raised = (node.exc for node in ast.walk(self.node) if isinstance(node, ast.Raise) and node.exc)
        return any(ast.unparse(what).startswith("NotImplementedError") for what in raised)

    @property
    def waits(self) -> bool:
        """Whether it awaits something, as IPython allows at the top."""
        try:
            return bool(self.code.co_flags & inspect.CO_COROUTINE)
        except _NO_CODE:
            return False

    @cached_property
    def needs(self) -> set[str]:
        """The names of the notebook that it uses, now or when it is called."""
        try:
            return names_of(self.code)
        except _NO_CODE:
            return set()


def names_of(code: CodeType) -> set[str]:
    """The names that code takes from its module, with the code in it."""
    inner = (names_of(const) for const in code.co_consts if isinstance(const, CodeType))
    asked = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
    return {i.argval for i in dis.get_instructions(code) if i.opname in asked}.union(*inner)


def needed_for(statements: list[Statement], names: set[str]) -> list[Statement]:
    """The statements that give or fill these names, or names that such statements need; in their order."""
    sets = {name: s.sets for s in statements if s.is_function for name in s.gives if s.sets}
    imported = {name for s in statements if s.is_import for name in s.gives}
    of_name: dict[str, list[int]] = {}
    for k, s in enumerate(statements):
        changed = (s.fills - imported).union(*(sets[name] for name in s.calls & sets.keys()))
        for name in s.gives | changed:
            of_name.setdefault(name, []).append(k)
    found, left, seen = set(), [*names], {*names}
    while left:
        for k in of_name.pop(left.pop(), ()):
            if k not in found:
                found.add(k)
                left += statements[k].needs - seen
                seen |= statements[k].needs
    return [statements[k] for k in sorted(found)]


def said_by(statements: list[Statement]) -> Mapping[str, str]:
    """Name -> the text that it is bound to, as in `EX = "03.1"`."""
    nodes = (s.node for s in statements if isinstance(s.node, ast.Assign) and isinstance(s.node.value, ast.Constant))
    found = {name.id: node.value.value for node in nodes for name in node.targets if isinstance(name, ast.Name)}
    return {name: value for name, value in found.items() if isinstance(value, str)}


def _at_top(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement, without those in functions, classes and comprehensions, whose names are theirs."""
    left: list[ast.AST] = [statement]
    while left:
        yield (node := left.pop())
        if not isinstance(node, _OWN_NAMES):
            left += ast.iter_child_nodes(node)


def _root(node: ast.expr) -> str:
    """`x` of `x.y[0].z`."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_constant(value: ast.expr | None) -> bool:
    """Of constants in capitals, literals, arithmetic and calls of libraries: `[1, 2]`, `MB * 25`, `np.float64(1)`."""
    return value is not None and all(
        node.id in _KNOWN or node.id.isupper() if isinstance(node, ast.Name) else not _is_large(node)
        for node in ast.walk(value)  # which is no recursion: a sum may be long
    )


def _is_large(node: ast.AST) -> bool:
    """Whether it may take much memory: a power of large numbers, or a text or list that is repeated."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Pow | ast.Mult):
        return False
    values = [getattr(side, "value", None) for side in (node.left, node.right)]
    if isinstance(node.op, ast.Pow):
        return not all(value in range(10_000) for value in values)
    return any(isinstance(x, (str, bytes)) for x in values) or not {ast.List, ast.Tuple}.isdisjoint(
        map(type, (node.left, node.right))
    )


def _is_other_name(value: ast.expr | None) -> bool:
    """`torch.float64`, the name of a function, or `partial` of it."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "partial"
    while isinstance(value, ast.Attribute):
        value = value.value
    return isinstance(value, ast.Name)
