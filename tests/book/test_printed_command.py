"""The command that chapter 14 prints finds the layout of the chapter, in the same seconds."""

import re
import shlex
from pathlib import Path

from IPython.core.inputtransformer2 import TransformerManager

from book.our_run import RUN
from lib.planner import best_layouts
from lib.planner.__main__ import main
from lib.planner.search import ALL_OPEN, layout_text

PAGE = Path(__file__).resolve().parents[2] / "chapters" / "14_choosing.md"


def printed() -> list[str]:
    """Its words, as IPython reads the lines."""
    lines = re.search(r"^    (%run -m lib\.planner .*?[^\\])\n", PAGE.read_text(encoding="utf-8"), re.M | re.S)[1]
    cell = TransformerManager().transform_cell(lines)
    (said,) = re.findall(r"run_line_magic\('run', '(.+)'\)", cell)
    return shlex.split(said)[3:]


def test_it_finds_the_layout_of_the_page_in_its_seconds(capsys):
    main(printed())
    best = best_layouts(RUN, ALL_OPEN)[0]
    said = " ".join(capsys.readouterr().out.split())
    assert f"1. {layout_text(best.layout)}, " in said
    assert f"{best.seconds.total:.2f} s per step: matmuls" in said
