"""A number that was typed into a page is found among what the page computes, and a changed one is not."""

import pytest

from tests.book.test_repository import tool

typed = tool("typed_numbers")

PAGE = """<article><section id="top"><h1>Top</h1><p>Read it in 17 minutes.</p>
<section id="one"><h2>One</h2>
<p>{before}</p>
<div class="cell tag_figure"><div class="cell_input"><pre>size = 3 * 2**20
shown = draw(size, caption="It takes 12 seconds at most.")
Guess(shown, "How many, 90 or so?", {{"it is 95 or so": "No, fewer."}}, answer=size)</pre></div>
<div class="cell_output"><table><tr><td>bytes sent</td><td>964,608 bytes</td><td>0.2914 s</td></tr></table>
<figure><svg><text>73.2%</text></svg><figcaption>99 GB of it.</figcaption></figure></div></div>
<p>{after}</p></section>
<section id="two"><h2>Two</h2><p>{elsewhere}</p></section>
<section id="quiz"><p><strong>1. With 400 of them?</strong></p>
<details class="option wrong"><summary>80</summary></details>
<details class="option right"><summary>0.29 s</summary></details></section></section></article>"""


def examined(before="Nothing.", after="Nothing.", elsewhere="Nothing.", cited=None):
    """What is typed there and not bound, of all but the page's own two: 17 minutes, 12 seconds."""
    unbound, total, missed = typed.examine(PAGE.format(before=before, after=after, elsewhere=elsewhere), cited or {})
    return [one for one in unbound if "[17]" not in one and "[12]" not in one], total - 3, missed


@pytest.mark.parametrize(
    "said",
    [
        "It sends 964,608 bytes.",
        "It sends 965 kB, nearly.",
        "It sends 0.96 MB, then waits.",
        "It takes 0.29 s.",
        "It takes 291 ms in all.",
        "That is 73 % of the time.",
        "That is 73% of the time.",
        "In 3 MiB of memory.",
        "In 3,145,728 of them.",
    ],
)
def test_a_number_that_the_section_computes_is_bound_and_a_larger_one_is_not(said):
    assert examined(before=said) == ([], 1, 0)
    assert examined(after=said) == ([], 1, 0)
    assert len(examined(elsewhere=said)[0]) == 1


@pytest.mark.parametrize(
    "said",
    [
        "It takes 0.35 s.",
        "It sends 97 GB.",
        "That is 88 %.",
        "It sends 99 GB of it.",
        "In 5 MiB.",
        "In 2**20 it is 30.",
    ],
)
def test_a_number_that_nothing_computes_is_found(said):
    (found,), _, _ = examined(before=said)
    assert found.startswith("one: …") and "[" in found


@pytest.mark.parametrize(
    "said",
    [
        "As chapter 12, section 7.2 and room 15.4 say, in 2019, for GPT-2, an H100 and Llama 70B in float32.",
        "Rank 7 and ranks 8, 9 and 10 send to layer 12 in 16 bits.",
        "Two of the 12 ranks wait for 3 others, 0 of them long.",
    ],
)
def test_names_places_years_and_small_counts_say_nothing_to_be_bound(said):
    assert examined(elsewhere=said) == ([], 0, 0)


def test_a_source_binds_what_the_passage_says_and_nothing_else():
    cited = {"a gain of 38 %": "Li et al., 2020"}
    assert examined(elsewhere="They report a gain of 38 % there.", cited=cited) == ([], 1, 0)
    assert len(examined(elsewhere="They report a gain of 39 % there.", cited=cited)[0]) == 1
    assert len(examined(elsewhere="They report a gain of 38 % and 27 ms.", cited=cited)[0]) == 1


def test_captions_are_typed_but_questions_and_wrong_answers_say_nothing():
    unbound, total, _ = typed.examine(PAGE.format(before="", after="", elsewhere=""), {})
    assert [one.partition(":")[0] for one in unbound] == ["opening", "one"] and "[12]" in unbound[1]
    assert total == 3  # with the right answer of the quiz, which may speak of the whole page


def test_a_changed_number_differs_in_what_is_written():
    for text, written in (
        ("0.2 s", "0.3 s"),
        ("27 units", "32 units"),
        ("964,608 B", "1,157,530 B"),
        ("1.25 ms", "1.50 ms"),
    ):
        (number,) = typed.numbers(f"It has {text}.")
        assert typed.changed(f"It has {text}.", number)[0] == f"It has {written}."
