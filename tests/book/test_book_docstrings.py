"""A docstring on a page: nothing in it is taken for markup, and each of its texts is there once."""

import pytest

from tests.book.book_project import load

docstrings = load("book_docstrings")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a * b, *args and **kwargs", r"a \* b, \*args and \*\*kwargs"),
        ("|x| of `|x|` and `a * b`", r"\|x\| of `|x|` and `a * b`"),
        ("the list_ and a_name", r"the list\_ and a_name"),
        ("Returns:\n    a sum", "Returns:\n    a sum"),
        ("Like:\n\n    f(*x)\n\nthen * this", "Like::\n\n    f(*x)\n\nthen \\* this"),
        ("It is so.\n\n    a * b\n\nThen.", "It is so.\n\n::\n\n    a * b\n\nThen."),
    ],
)
def test_nothing_in_a_docstring_is_taken_for_markup_but_backticks_and_code(text, shown):
    assert "\n".join(docstrings.plain(text.split("\n"))) == shown


class Wheel:
    """A wheel.

    Args:
        size, width: in metres,
            of the rim.
        *spokes: of it_.
    """


class Car:
    """A car: it has wheels.

    Args:
        size, colour: as for `Wheel`.
        wheel: as for `Bicycle`.
    """


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("The mean: of all.", ["The mean: of all.", ""]),
        (
            "Args:\n    a, b: both * them\n        and more",
            [":Parameters:", r"    - **a**, **b** – both \* them", "      and more", ""],
        ),
        ("Raises:\n    ValueError, KeyError: no.", [":Raises:", "    - ``ValueError``, ``KeyError`` – no.", ""]),
        ("Returns:\n    full key: its tensor,\n    [n]", [":Returns:", "    full key: its tensor,", "    [n]", ""]),
        (
            "Example:\n    f(*x)\n\n    g(x)",
            [":Example:", "    .. code-block:: python", "", "        f(*x)", "", "        g(x)", ""],
        ),
        (
            "Args:\n    size, spokes: as for `Wheel`. Not 0.",
            [
                *(":Parameters:", "    - **size** – in metres,", "      of the rim."),
                *("    - **spokes** – as for `Wheel`. Not 0.", ""),
            ],
        ),
        ("Args:\n    x: as for `Nobody`.", [":Parameters:", "    - **x** – as for `Nobody`.", ""]),
        ("Args:\n    colour: a word\n\nThen.", [":Parameters:", "    - **colour** – a word", "", "Then.", ""]),
    ],
)
def test_sections_say_each_text_once_and_whole(text, shown):
    assert docstrings.rst(text.split("\n"), {"Wheel": Wheel}) == shown


def test_a_reference_is_followed_through_a_second_one():
    shown = docstrings.rst(["Args:", "    size: as for `Car`."], {"Car": Car})
    assert shown == [":Parameters:", "    - **size** – in metres,", "      of the rim.", ""]
