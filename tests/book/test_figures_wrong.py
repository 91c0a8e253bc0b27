"""Something that is not right has a red frame, and no colour that means a tensor or a message."""

from book.figures.doctor import figures_of
from book.figures.fingerprint import draw_fingerprint
from book.figures.svg import PALETTE, Figure
from tests.book.drawn import painted, parse
from tests.book.test_figures_doctor import found

MEANINGS = ("forward", "backward", "weight", "param", "gradient", "activation", "opt")


def inks(figure: Figure) -> dict[str, int]:
    """Name of a colour → how many shapes and words are painted with it."""
    paints = [own.get(key, "") for _, own in painted(parse(figure)) for key in ("fill", "stroke")]
    return {name: sum(f"var(--pbh-{name}," in paint for paint in paints) for name in PALETTE}


def test_a_fingerprint_marks_each_wrong_value_in_red():
    one, two = ({"a": [1, 0.5, 1], "b": [1, 1, value]} for value in (1, 2))
    one, two = (inks(draw_fingerprint(rows, title="t", alt="a")) for rows in (one, two))
    assert two["bad"] == one["bad"] + 1 and not any(two[name] for name in (*MEANINGS, "comm"))


def test_a_link_that_looks_wrong_has_a_red_frame_and_is_drawn_as_the_others():
    wrong = [{"kind": "link", "ranks": [0, 1], "text": "slow"}]
    sound, sick = (inks(next(figures_of(found(findings=findings)))) for findings in ([], wrong))
    assert sick["bad"] > sound["bad"] == 0
    assert sound["comm"] == sick["comm"] and not any(sick[name] for name in MEANINGS)
