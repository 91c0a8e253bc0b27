"""Words and columns of what the instruments of `lib` print."""

from collections.abc import Iterable, Sequence


def counted(number: int, what: str) -> str:
    """A number of things, in the singular if it is one."""
    return f"{number} {what}{'s' * (number != 1)}"


def few(names: Sequence[str]) -> str:
    """The first three of some names, and dots for the rest."""
    return ", ".join(names[:3]) + ", …" * (len(names) > 3)


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines with columns as wide as their widest cell."""
    columns = [[cell.rjust(max(map(len, column))) for cell in column] for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(row) for row in zip(*columns, strict=True)]
