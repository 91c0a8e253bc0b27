"""The whole interface of a class: what it has itself, and what it inherits from classes of the library.

A subclass says only what is new in it, and a reader of its entry wants all: `FSDP` has its `finish` from
`DataParallel`, and its `optimizer` from `ShardedOptimizer`. What other packages say of their classes is not repeated.
"""

import inspect
from functools import cached_property
from importlib import import_module

from book_docstrings import sections

FLOORS = ("lib", "course", "book")
CALLED = (property, cached_property, staticmethod, classmethod)


def located(path: str) -> object:
    """What a path leads to, or None; a module, where a package also has a function of its name."""
    module, _, last = path.rpartition(".")
    try:
        return import_module(path)
    except ModuleNotFoundError:
        return getattr(located(module), last, None) if module else None


def family(cls: type) -> list[type]:
    """The class and the classes of the library, or of its own module, that it inherits from; nearest first."""
    ours = (*FLOORS, cls.__module__.split(".")[0])
    return [one for one in cls.__mro__ if one.__module__.split(".")[0] in ours]


def interface(cls: type) -> list[str]:
    """Its public methods and properties, its own first."""
    names = (name for one in family(cls) for name, x in vars(one).items() if inspect.isfunction(x) or _is_called(x))
    return list(dict.fromkeys(name for name in names if not name.startswith("_")))


def _is_called(x: object) -> bool:
    return isinstance(x, CALLED)


def home(cls: type, name: str) -> type | None:
    """The nearest class that defines this member."""
    return next((one for one in family(cls) if name in vars(one)), None)


def doc(cls: type, name: str) -> list[str]:
    """What the nearest class that says anything of this member says."""
    said = (inspect.cleandoc(vars(one)[name].__doc__ or "") for one in family(cls) if name in vars(one))
    return next(filter(None, said), "").split("\n")


def bases(cls: type) -> list[str]:
    """The names of its bases; in place of one whose name begins with _, those of that."""
    found: list[str] = []
    for one in vars(cls).get("__orig_bases__", cls.__bases__):  # as written: of a tuple, NamedTuple
        name = getattr(one, "__name__", str(one))
        if name.startswith("_") and isinstance(one, type):
            found += bases(one)
        elif one is not object:
            found.append(name)
    return found


def completed(cls: type) -> list[str]:
    """The docstring of a class, with what its bases say of it: attributes, and arguments if it is made as they are."""
    lines = inspect.cleandoc(cls.__doc__ or "").split("\n")
    has = {title for title, _ in sections(lines)}
    said: dict[str, list[str]] = {}
    for one in family(cls)[1:]:
        for title, body in sections(inspect.cleandoc(one.__doc__ or "").split("\n")):
            is_maker = one is home(cls, "__init__") and title in ("Args", "Raises") and title not in has
            if title == "Attributes" or is_maker:
                said.setdefault(title, []).extend(body)
    for title, body in said.items():
        lines = with_section(lines, title, body)
    return lines


def with_section(lines: list[str], title: str, body: list[str]) -> list[str]:
    """The docstring with more lines at the end of a section, which is made if it is not there."""
    body = [f"    {line}" for line in body]
    if f"{title}:" not in lines:
        at = lines.index("Example:") if "Example:" in lines else len(lines)  # an example is last
        return [*lines[:at], f"{title}:", *body, "", *lines[at:]]
    start = lines.index(f"{title}:") + 1
    end = next((i for i in range(start, len(lines)) if lines[i][:1].strip()), len(lines))
    while not lines[end - 1].strip():
        end -= 1
    return [*lines[:end], *body, *lines[end:]]
