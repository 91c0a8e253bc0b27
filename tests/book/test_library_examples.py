"""The examples of the page for users, run as it says: the first starts ranks, the others run on two, in its order."""

import inspect

from lib.launch import run
from tests.book.book_project import load

library, docstrings = load("book_library"), load("book_docstrings")
located = load("book_interface").located


def examples() -> dict[str, str]:
    """The code of each, by what it is of."""
    found = {
        path: dict(docstrings.sections(inspect.getdoc(located(path)).split("\n"))) for path in library.for_users()
    }
    return {path: "\n".join(said["Example"]) for path, said in found.items() if "Example" in said}


def on_a_rank(world, codes: dict[str, str]) -> list[str]:
    names = {"world": world}
    for path, code in codes.items():
        exec(compile(code, f"<example of {path}>", "exec"), names)
    return list(codes)


def test_the_examples_run():
    first, *others = examples().items()
    exec(compile(first[1], f"<example of {first[0]}>", "exec"), {})
    assert first[0] == "lib.launch.run"
    assert run(on_a_rank, 2, dict(others)) == [[path for path, _ in others]] * 2
