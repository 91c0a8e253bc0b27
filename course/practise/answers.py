"""The verdict on an answer: right, half right, or wrong with a hint that says where to look."""

from __future__ import annotations

from collections.abc import Sequence

from course.practise.causes import CAUSES, place_text

RERUN = (
    "Compare the rows of the report, or run a layout in which one axis has one rank: where the place does not exist, "
    "the sickness is gone."
)
RIGHT, HALF, WRONG = "right", "half right", "wrong"
Pairs = Sequence[tuple[str, str]]  # (cause, place)


def verdict_on(sickness: Pairs, named: Pairs) -> tuple[str, str]:
    """`right`, `half right` or `wrong`, and sentences for a reader.

    Args:
        sickness: what the run has.
        named: what the reader says that it has.

    Raises:
        ValueError: a cause that is not in the catalogue.
    """
    true, lines, found = dict(sickness), [], []
    for name, place in named:
        if name not in CAUSES:
            raise ValueError(f"{name!r} is no cause: --causes lists them all")
        if name in true and place_text(place) == true[name]:
            lines.append(f"{name}, {true[name]}: right. {CAUSES[name].says}")
            found.append(name)
        elif name in true:
            lines.append(f"{name}: the cause is right, the place is not. It is {CAUSES[name].where}. {RERUN}")
        else:
            overlooked = [f" Look at {CAUSES[one].look}." for one in true if one not in dict(named)]
            lines.append(f"{name}: no. It would show {CAUSES[name].shows}.{''.join(overlooked[:1])}")
    hits = sum(name in true for name, _ in named)
    if not named:
        lines.append("Name a cause and its place.")
    elif hits == len(named) < len(true):
        left = next(name for name in true if name not in dict(named))
        lines.append(f"This is not all: the run has a second cause. Look at {CAUSES[left].look}.")
    is_right = len(found) == len(true) == len(named)
    return RIGHT if is_right else HALF if hits else WRONG, "\n".join(lines)
