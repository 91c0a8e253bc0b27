"""What a person looks at in a notebook: code that no answer needs. It costs no points."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from course.check.magics import parse
from course.check.source import Notebook

# The imports in the book's cells are exceptions, word for word. A pattern must be fast: a line may be long.
_SUSPICIOUS = {
    "course": r"(?m)^(?!from course\.check import check(?:, hint)?(?:, progress)?$"
    r"|from course\.check\.bill import bill$|from course\.check\.refusals import broken_layouts$"
    r"|from course\.practise import sick_run$|from course\.practise\.foreign import page_of_program$"
    r"|from course\.check\.two_nodes import two_nodes$)"
    r"[^\n]*\bcourse\s*\.\s*(?:check|exercises|practise|grade|release)\b"
    r"|from\s+course\s+import|\bimport\s[^\n]{0,80}\bcourse\s*(?:[,;#]|as\b|$)"
    r"|\bcourse\s*/\s*\w|[\"']check[\"']|[\"']course[\"'](?!, \"book\"\):$)|getattr\(\s*course\b",
    "lib.runtime": r"\blib\s*[./]\s*runtime\b|from\s+lib\s+import(?:\\\n|[^\n]){0,80}\bruntime\b"
    r"|from\s+lib\s+import\s*\([^)]{0,80}\bruntime\b",
    "modules": r"(?m)sys\.modules(?!\.get\(name\), \"__file__\", None\)$| and not \(origin and has_book\()"
    r"|from\s+sys\s+import|\bsys\s+as\b|\bpkgutil\b|\brunpy\b"
    r"|\bimportlib\b(?!\.util, os, subprocess, sys, zipfile$|\.util\.find_spec\(\"lib\"\) if spec|"
    r"\.util\.find_spec\(\"lib\"\)$)",
    "what functions are made of": r"__(?:globals|builtins|subclasses|code|closure|getattribute|mro|bases)__"
    r"|__(?:dict|wrapped)__|\bbuiltins\b|\blisteners\b|(?<![.\w])(?:vars|globals|locals|dir)\s*\(",
    "/proc": r"/proc\b",
    "frames": r"(?m)_getframe|currentframe|gc\.get_|\b[ft]b?_(?:back|frame|globals|locals)\b|walk_stack"
    r"|\binspect[ \t]*(?:[.,;]|as\b|import\b|$)",
    "ctypes": r"\bctypes\b",
    "sockets": r"\bimport\s+socket|from\s+socket|\blogging\s*\.\s*handlers|\b(?:SysLogHandler|asyncio)\b",
    "messages that are not counted": r"_get_default_store|get_group_store|\b(?:TCP|File|Hash|Prefix)?Store\s*\("
    r"|\bcomm\s*\.\s*_\w|distributed_c10d|\btorch\s*\.\s*ops\b|\brpc\b|symmetric_memory",
    "files": r"(?m)/dev/shm|/tmp\b|\btempfile\b|\bmmap\b|\bmemmap\b|share(?:d_)?_?memory|mkfifo|(?<![.\w])open\s*\("
    r"|\.(?:read|write)_(?:text|bytes)\s*\((?!encoding=\"utf-8\"\)$|archive\.read\(files\[name\]\)\)$)"
    r"|\btorch\s*\.\s*(?:save|load)\s*\(|\.tofile\s*\(|from_?file\s*\("
    r"|\b(?:np|numpy)\s*\.\s*(?:save|load)|\bos\s*\.\s*(?:open|pipe|link|symlink|mkfifo|memfd_create)\b",
    "code from a string": r"(?<![.\w])(?:exec|eval|compile)\s*\(|__import__",
    # The first cell of each notebook fetches the book with such a run.
    "processes": r"\bmultiprocessing\b"
    r"|\bos\.(fork|kill|setsid|exec\w*|spawn\w*|system)\b|from subprocess\b|\bsubprocess as\b"
    r"|\bsubprocess\.(?!PIPE\b|STDOUT\b|run\(command, stdout=subprocess\.PIPE, stderr=subprocess\.STDOUT, text=True\))",
}


_BY_NAME = {"getattr": 1, "attrgetter": 0, "methodcaller": 0}  # function -> the place of the name


def suspicious(notebook: Notebook) -> list[str]:
    """What is in it, a name for each kind."""
    text = "\n".join(text for _, text in notebook.cells)
    found = [what for what, pattern in _SUSPICIOUS.items() if re.search(pattern, text)]
    computes = any(map(_computes_a_name, (node for _, text in notebook.cells for node in _nodes(text))))
    return found + ["an attribute whose name is computed"] * computes


def _nodes(text: str) -> Iterator[ast.AST]:
    try:
        yield from ast.walk(parse(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # nothing of it is defined, either
        return


def _computes_a_name(node: ast.AST) -> bool:
    """Whether this is `getattr(x, name)`, and the name is not written out: it can be put together of pieces."""
    if not isinstance(node, ast.Call):
        return False
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    place = _BY_NAME.get(called, len(node.args))
    return any(not isinstance(name, ast.Constant) for name in node.args[place : place + 1])
