"""What tests of checks share: answers that nearly are another program, notebooks of cells, and what is said of both."""

import json

from course.check import verdict
from course.check.edits import read_mistakes


def edited(edit, *programs):
    """A program that is not on the exercise's list."""
    (wrong,) = read_mistakes(f"{edit}\n    A hint.", *programs)
    return lambda *given: wrong.wrong.load()(*given)


def notebook(tmp_path, *cells, name=""):
    path = tmp_path / (name or f"{len(list(tmp_path.iterdir()))}.ipynb")
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": source} for source in cells]}))
    return str(path)


def assert_told(exercise_id, answer, *words):
    """The answer passes, or its verdict, with what to do, has these words: FAIL, unless TODO is one of them."""
    text, status = verdict(exercise_id, answer, told=True)
    assert status == ("TODO" if "TODO" in words else "FAIL" if words else "PASS"), text
    for word in words:
        assert word in " ".join(text.split()) or word in text, text
    assert "course/check" not in text and "_in_rank" not in text
    return text
