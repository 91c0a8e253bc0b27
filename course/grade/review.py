"""What a person looks at in a notebook: code that no answer needs. It costs no points."""

from __future__ import annotations

import re

from course.check.source import Notebook

# The imports in the book's cells are exceptions, word for word. Each pattern must be fast: a line may have millions of letters.
_SUSPICIOUS = {
    "course": r"(?m)^(?!from course\.check import check(?:, hint)?(?:, progress)?$"
    r"|from course\.check\.bill import bill$|from course\.check\.refusals import broken_layouts$"
    r"|from course\.practise import sick_run$)"
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
    r"|\bbuiltins\b",
    "/proc": r"/proc\b",
    "frames": r"(?m)_getframe|currentframe|gc\.get_|\b[ft]b?_(?:back|frame|globals|locals)\b|walk_stack"
    r"|\binspect[ \t]*(?:[.,;]|as\b|import\b|$)",
    "ctypes": r"\bctypes\b",
    "sockets": r"\bimport\s+socket|from\s+socket",
    "code from a string": r"(?<![.\w])(?:exec|eval|compile)\s*\(|__import__",
    # The first cell of each notebook fetches the book with such a run.
    "processes": r"\bos\.(fork|kill|setsid|exec\w*|spawn\w*|system)\b|from subprocess\b|\bsubprocess as\b"
    r"|\bsubprocess\.(?!PIPE\b|STDOUT\b|run\(command, stdout=subprocess\.PIPE, stderr=subprocess\.STDOUT, text=True\))",
}


def suspicious(notebook: Notebook) -> list[str]:
    """What is in it, a name for each kind."""
    text = "\n".join(text for _, text in notebook.cells)
    return [what for what, pattern in _SUSPICIOUS.items() if re.search(pattern, text)]
