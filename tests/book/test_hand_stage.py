"""Chapter 9 imports the two functions that chapter 8 writes: they are the same, line by line."""

import ast
import inspect
import re
from pathlib import Path

from book.trials.hand_stage import one_stage

CHAPTER = Path(__file__).resolve().parents[2] / "chapters" / "08_pipelines.md"
SIZES = {"config.d_model": "width", "len(inputs)": "rows"}  # which chapter 8 has in its cells


def two_functions(source: str) -> list[str]:
    """`forward` and `backward` inside of `one_stage`, without their annotations."""
    (made,) = ast.parse(source).body
    found = [one for one in made.body if isinstance(one, ast.FunctionDef)]
    for one in found:
        one.returns = one.args.args[0].annotation = None
    return [ast.unparse(one) for one in found]


def test_the_module_has_the_lines_of_chapter_8():
    shown = re.search(r"^def one_stage\(.*?(?=^```)", CHAPTER.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)[
        0
    ]
    for size, name in SIZES.items():
        assert size in shown
        shown = shown.replace(size, name)
    ours = two_functions(inspect.getsource(one_stage))
    assert len(ours) == 2 and ours == two_functions(shown)
