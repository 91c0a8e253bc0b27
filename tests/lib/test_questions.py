"""Twenty questions of a contributor have a file that answers them."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_question_has_a_file():
    answers = tomllib.loads((ROOT / "tests/lib/questions.toml").read_text(encoding="utf-8"))
    assert len(answers) == 20
    assert [path for path in answers.values() if not (ROOT / path).exists()] == []
