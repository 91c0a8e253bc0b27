"""The whole interface of a class: what it inherits from the library is its own to a reader."""

import inspect
from typing import NamedTuple

from tests.book.book_project import load

interface = load("book_interface")


class Engine:
    """Runs.

    Args:
        fuel: what it burns.

    Raises:
        ValueError: none left.

    Attributes:
        hours: that it ran.
    """

    def __init__(self, fuel):
        self.fuel, self.hours = fuel, 0

    def start(self):
        """Start it."""

    def stop(self):
        """Stop it."""

    @property
    def hot(self):
        """Whether it ran long."""

    def _spark(self):
        """Not for users."""


class _Hidden(Engine):
    """A base whose name nobody needs."""


class Diesel(_Hidden):
    """Burns diesel.

    Attributes:
        glow: seconds before it starts.
    """

    def stop(self):
        pass


class Pair(NamedTuple):
    """Two."""

    a: int
    b: int


def test_the_interface_has_what_is_inherited_and_nothing_with_an_underscore():
    assert interface.interface(Diesel) == ["stop", "start", "hot"]
    assert interface.interface(Pair) == []
    assert interface.doc(Diesel, "stop") == ["Stop it."]
    assert interface.home(Diesel, "stop") is Diesel and interface.home(Diesel, "start") is Engine


def test_a_base_without_a_public_name_is_replaced_by_its_own():
    assert interface.bases(Diesel) == ["Engine"] and interface.bases(Engine) == []
    assert interface.bases(Pair) == ["NamedTuple"]


def test_a_class_that_does_not_say_how_it_is_made_is_made_like_its_base():
    said = "\n".join(interface.completed(Diesel))
    assert "Attributes:\n    glow: seconds before it starts.\n    hours: that it ran." in said
    assert "Args:\n    fuel: what it burns." in said and "Raises:\n    ValueError: none left." in said
    assert "\n".join(interface.completed(Engine)) == inspect.cleandoc(Engine.__doc__)
