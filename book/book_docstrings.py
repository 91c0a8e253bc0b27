"""A docstring of Google's style as reStructuredText: what it says is shown once, and no colon makes a type.

Docstrings are plain text with `code` in backticks, indented code, and sections. A section becomes a field; `Args`,
`Attributes` and `Raises` are lists of names, and `a, b: text` is one entry of both. In the place of "a, b: as for X"
stands the text that X has for them, if X is a name of the scope.
"""

import inspect
import re
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from textwrap import dedent, indent
from typing import NamedTuple

MARKS = re.compile(
    r"(`[^`]*`)|([*|\\]|(?<=\w)_(?!\w))"
)  # what reStructuredText would take for markup, outside of code
SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Example):")
LISTS = ("Args", "Attributes", "Raises")
ITEM = re.compile(r"(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*): *(.*)")
AS_FOR = re.compile(r"as for `([\w.]+)`(?: and `([\w.]+)`)?(?:\. ?|$)(.*)")


class Item(NamedTuple):
    """A text of a list and the names that it is for; none for a sentence of its own."""

    names: tuple[str, ...]
    text: list[str]


def plain(lines: Sequence[str]) -> list[str]:
    """Lines in which only backticks, lists and indented code mean anything."""
    result, code = [], None  # code: the indentation of the line that announced it
    for i, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if code is not None and (not line.strip() or indent > code):
            result.append(line)
            continue
        code = None
        result.append(MARKS.sub(lambda m: m.group(1) or "\\" + m.group(2), line))
        after = lines[i + 1 : i + 3]
        if line.strip() and len(after) == 2 and not after[0].strip() and after[1].startswith(" " * (indent + 1)):
            result += [] if line.endswith(":") else ["", " " * indent + ":"]
            result[-1] += ":"
            code = indent
    return result


def sections(lines: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Titles and their lines; sentences have the title ""."""
    found: list[tuple[str, list[str]]] = [("", [])]
    for line in lines:
        if title := SECTION.fullmatch(line.rstrip()):
            found.append((title[1], []))
            continue
        if found[-1][0] and line[:1].strip():  # what is not indented is a sentence again
            found.append(("", []))
        found[-1][1].append(line)
    return [(title, _flush(body)) for title, body in found if any(body)]


def items(body: Sequence[str]) -> list[Item]:
    """The entries of a list."""
    found: list[Item] = []
    for line in body:
        if match := ITEM.fullmatch(line):
            found.append(Item(tuple(match[1].split(", ")), [match[2]] if match[2] else []))
        elif line[:1].strip() and (not found or found[-1].names):
            found.append(Item((), [line]))
        elif found:
            found[-1].text.append(line)
    return [Item(names, [*text[:1], *_flush(text[1:])]) for names, text in found]


def items_of(thing: object, title: str, scope: Mapping[str, object]) -> Iterator[Item]:
    """The entries that a class, with its bases, or a function has in the lists of this title."""
    for one in inspect.getmro(thing) if inspect.isclass(thing) else [thing]:
        its = ChainMap(getattr(inspect.getmodule(one), "__dict__", {}), scope)
        for body in (body for found, body in sections((inspect.getdoc(one) or "").split("\n")) if found == title):
            yield from (full for item in items(body) for full in resolved(item, its))


def resolved(item: Item, scope: Mapping[str, object]) -> list[Item]:
    """The entry with the text that it refers to, as far as the names of the scope lead there."""
    match = AS_FOR.fullmatch(" ".join(item.text))
    if not match:
        return [item]
    found, rest = [], item.names
    for path in filter(None, match.group(1, 2)):
        for theirs in items_of(looked_up(path, scope), "Args", scope):
            if shared := tuple(name for name in rest if name in theirs.names):
                found.append(Item(shared, [*theirs.text]))
                rest = tuple(name for name in rest if name not in shared)
    if rest or not found:
        return [*found, Item(rest, item.text)]
    found[-1].text.extend([match[3]] if match[3] else [])
    return found


def looked_up(path: str, scope: Mapping[str, object]) -> object:
    """What a name, perhaps with dots, is in a module; None if it is nothing there."""
    first, *more = path.split(".")
    found = scope.get(first)
    for name in more:
        found = getattr(found, name, None)
    return found


def rst(lines: Sequence[str], scope: Mapping[str, object]) -> list[str]:
    """The docstring's lines in reStructuredText.

    Args:
        scope: what names in it mean: those of its module, and others that every module may refer to.
    """
    out: list[str] = []
    for title, body in sections(lines):
        if title == "Example":
            body = [".. code-block:: python", "", *_in(body)]
        elif title in LISTS:
            found = [full for item in items(body) for full in resolved(item, scope)]
            body = [line for item in found for line in _entry(item, title)]
        else:
            body = plain(body)
        shown = "Parameters" if title == "Args" else title
        out += [f":{shown}:", *_in(body), ""] if title else [*body, ""]
    return out


def _entry(item: Item, title: str) -> list[str]:
    mark = "``" if title == "Raises" else "**"
    names = ", ".join(f"{mark}{plain([name])[0] if mark == '**' else name}{mark}" for name in item.names)
    first, *rest = plain(item.text) or [""]
    return [f"- {names} – {first}" if names else f"- {first}", *_in(rest, 2)]


def _in(lines: Sequence[str], by: int = 4) -> list[str]:
    return indent("\n".join(lines), " " * by).split("\n") if lines else []


def _flush(lines: Sequence[str]) -> list[str]:
    """Lines without their common indentation, and without empty ones at the ends."""
    return dedent("\n".join(lines)).strip("\n").split("\n") if lines else []
