"""Pages keep to their form; and each thing that the form asks is missed where a page breaks it."""

import re
from pathlib import Path

import jupytext
import pytest

from book.figures.show import show
from lib.lab.claims import number
from tests.book.test_repository import tool

ROOT = Path(__file__).resolve().parents[2]
form = tool("page_form")


def cell(source: str, tag: str = "") -> str:
    tags = f":tags: [{tag}]\n\n" if tag else ""
    return f"```{{code-cell}}\n{tags}{source}```\n\n"


PAGE = "\n".join(
    [
        '<p class="kick">Chapter 90 · Part <a class="colab" href="https://x.org/y">Open in Colab</a></p>\n',
        "# Three little words\n\n1 minutes to read, a minute to compute.\n",
        cell("import math\nfrom lib import claim, collectives\nfrom book.figures.show import show\n", "setup"),
        cell('side = math.pi\ndraw(side, alt="A circle.", caption="Round.")\n', "figure"),
        cell("two = 1 + 1\n\nfour = two + two\n"),
        cell('# Measured: two.\nclaim("two", 2, two)\n', "evidence"),
        cell('claim("an answer", 4, four)\n', "hide-cell"),
        "## Quiz\n\n**1. Is it [so](https://x.org)?**\n",
        '<details class="option"><summary>yes</summary>Right: it is.</details>',
        '<details class="option"><summary>no</summary>Wrong: look again.</details>\n',
        "## Going deeper\n\nAs many words as anyone likes.\n\n### Further\n",
        cell("eight = four + four\n"),
        "## Papers\n\n- One\n",
    ]
)
EXPLORER = 'Explorer(walk, "A walk", n=[1, 2])\n'


def read(text: str):
    return jupytext.reads(text, fmt="md:myst")


def test_every_page_of_that_form_keeps_to_it():
    pages = {path.stem: read(path.read_text(encoding="utf-8")) for path in sorted(ROOT.glob("chapters/*.md"))}
    problems = {name: form.problems(page) for name, page in pages.items()}
    assert {name: found for name, found in problems.items() if found} == {}


def test_what_is_counted_is_what_a_reader_sees():
    page = read(PAGE)
    assert form.problems(page) == []
    words = 3 + 3 + 8 + 2  # Chapter 90 Part, Three little words, 1 minutes ... compute, Papers, One
    size = form.measure(page)
    assert size == form.Size(words=words, lines=2, figures=1, questions=1)
    assert 1 < words / 150 + (2 * 8 + 45 + 45) / 60 < 2 and size.minutes == 2
    large = form.Size(words=1500, lines=30, figures=4, players=2, guesses=3, questions=8, problems=5)
    assert large.minutes == 10 + 4 + 3 + 4 + 3 + 6
    assert large.stated == "30 minutes to read, 15 to practise"


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        ("# Three", "# $$a + b$$ `a code` $x$ Three", {"words": 3}),
        ("As many", "Twice as many", {}),
        ("eight =", "sixteen = 16\neight =", {}),
        ("Right: it", "Right, as we saw: it", {}),
        ("two = 1", "# a comment\ntwo = 1", {"lines": 1}),
        ("## Quiz", "```python\nprint(2)\n\nprint(3)\n```\n\n## Quiz", {"lines": 2}),
        ('draw(side, alt="A circle.", caption="Round.")\n', EXPLORER, {"figures": -1, "players": 1}),
        (":tags: [figure]", ":tags: [figure, remove-output]", {"figures": -1}),
        ("## Quiz", "## Practice\n\n**1.** How many?\n\n## Quiz", {"problems": 1}),
        ("## Quiz", "## Worked examples\n\n**1.** How many?\n\n## Quiz", {"problems": 1}),
        ("## Quiz", "## Key terms\n\n**Rank**: a process.\n\n## Quiz", {}),
        ('draw(side, alt="A circle.", caption="Round.")\n', "play_ring()\n", {"figures": -1, "players": 1}),
        ("draw(side", "Guess(side", {"guesses": 1}),
    ],
)
def test_each_change_counts_as_much_as_it_should(before, after, change):
    was, now = (vars(form.measure(read(text))) for text in (PAGE, PAGE.replace(before, after, 1)))
    assert {what: now[what] - was[what] for what in was if now[what] != was[what]} == change


def lines(number: int) -> str:
    return "".join(f"x{i} = {i}\n" for i in range(number))


IDEA = "two = 1 + 1\n"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("# Three", "# " + "word " * 3085 + "Three", "3101 words, at most 3100"),
        ("## Quiz", 4 * cell(lines(25)) + "## Quiz", "102 lines of visible code, at most 80"),
        ("## Quiz", "## Quiz\n\n" + "**1.** So?\n\n" * 99, "77 minutes to read, at most 40"),
        (IDEA, lines(25), "x0 = 0: 26 lines of an idea, at most 25"),
        (IDEA, 'claim("two", 2, 2)\n' + IDEA, "a claim stands in a cell with the tag evidence"),
        (IDEA, 'draw(x, alt="x")\n' + IDEA, "a picture is made in a cell with the tag figure"),
        (IDEA, 'draw(x, caption="x")\n' + IDEA, "a picture is made in a cell with the tag figure"),
        (IDEA, EXPLORER + IDEA, "a picture is made in a cell with the tag figure"),
        ("draw(", 'claim("x", 1, 1)\ndraw(', "a claim stands in a cell with the tag evidence"),
        ("import math\n", "import math\ndef f(): pass\n", "import math: it holds more than imports"),
        (
            "## Quiz",
            cell("from lib import comm\n", "setup") + cell("def f():\n    comm.barrier\n", "plain") + "## Quiz",
            "def f.*: it is no plain PyTorch, with comm of the book",
        ),
        ("## Quiz", cell("# Measured: x.\nx = 1\n", "evidence") + "## Quiz", "evidence without a claim"),
        ("# Measured: two.\n", "", "evidence begins with a sentence: # Measured:, # Modelled:"),
        ('claim("two", 2, two)', 'claim("two", 2, lambda: two)', "it measures a time.*: tag it alone"),
        ('claim("two", 2, two)', 'claim("two", 2, partial(f, 2))', "it measures a time.*: tag it alone"),
        (
            'claim("two", 2, two)',
            'def f():\n    return 2\n\nclaim("two", 2, f)',
            "it measures a time.*: tag it alone",
        ),
        ('claim("two", 2, two)', 'claim("two", 2, Rehearsals(s).bubble)', "it measures a time.*: tag it alone"),
        ("two = 1 + 1", "# its square\ntwo = side**2", "its square: side: defined only in a folded cell above"),
        ("two = 1 + 1", "def f(x):\n    return side * x", "side: defined only in a folded cell above"),
        (":tags: [figure]", ":tags: [figure, open]", "open goes with evidence"),
        (":tags: [figure]", ":tags: [figure, setup]", "a cell is of one kind"),
        (":tags: [figure]", ":tags: [hide-input]", "hide-input hides code; say what it is"),
        (":tags: [figure]", ":tags: [remove-input]", "remove-input hides code; say what it is"),
        ("eight = four", lines(25) + "eight = four", "26 lines of an idea"),
    ],
)
def test_what_breaks_the_form_is_named(before, after, said):
    assert PAGE.count(before) >= 1
    found = form.problems(read(PAGE.replace(before, after, 1)))
    assert [problem for problem in found if re.search(said, problem)], found


def test_a_visible_cell_may_name_what_is_its_own_or_visible():
    for code in ("side = 2\ntwo = side", "def f(side):\n    return side", "two = [side for side in (1, 2)]"):
        assert form.problems(read(PAGE.replace("two = 1 + 1", code + "\ntwo = 2", 1))) == []


def test_what_is_just_within_the_limits_is_let_be():
    for before, after in [
        ("# Three", "# " + "word " * 3084 + "Three"),
        ("## Quiz", 3 * cell(lines(24)) + cell(lines(6)) + "## Quiz"),
        ("## Quiz", "## Quiz\n\n" + "**1.** So?\n\n" * 50),
        (IDEA, lines(24)),
    ]:
        assert form.problems(read(PAGE.replace(before, after, 1))) == []


ASKED = """> **Guess before you read on.** How many?
>
> <details class="option"><summary>1</summary>Then add one.</details>
> <details class="option"><summary>2</summary>Right: 1 + 1.</details>
> <details class="option"><summary>3</summary>That is 1 + 2.</details>
"""


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("> <details", "> details", "on.** How many?: a guess without options"),
        ("Right: ", "", "3 options, 0 right"),
        ("Then", "Right: then", "3 options, 2 right"),
        ("Then add one.", "", "each says why"),
        (ASKED.splitlines()[-1], "", "2 options, 1 right; 3 to 5"),
        ("?\n", '?\n> <details class="option"><summary>0</summary>No.</details>\n', "1 options, 0 right"),
    ],
)
def test_a_guess_has_options_with_a_right_one(before, after, said):
    whole, broken = (
        form.problems(read(PAGE.replace("## Quiz", f"{guess}\nAnd on.\n\n## Quiz", 1)))
        for guess in (ASKED, ASKED.replace(before, after))
    )
    assert whole == [] and len(broken) == 1 and said in broken[0]


def test_a_page_without_evidence_is_left_as_it_is():
    page = read(PAGE.replace(":tags: [evidence]", ":tags: [hide-input]"))
    before = page.cells[0].source
    form.state_minutes(page)
    assert form.problems(page) == [] and page.cells[0].source == before


def test_the_minutes_are_put_in_where_the_page_states_them_and_nowhere_else():
    page = read(PAGE.replace("# Three", "It is not 9 minutes to read.\n\n# Three"))
    form.state_minutes(page)
    assert "\n2 minutes to read, a minute to compute." in page.cells[0].source
    assert "It is not 9 minutes to read." in page.cells[0].source
    with pytest.raises(ValueError, match='begins with "NN minutes to read"'):
        form.state_minutes(read(PAGE.replace("1 minutes to read, ", "")))


@pytest.mark.parametrize("thing", ["cost.forward_flops", "Bucket.take", "Bucket", "collectives.naive_reduce"])
def test_what_show_prints_is_counted(thing):
    names = {}
    code = "from lib import collectives, cost\nfrom lib.data_parallel.bucket import Bucket\n"
    exec(code, names)
    printed = repr(show(eval(thing, names))).splitlines()
    page = read(f"```{{code-cell}}\n{code}show({thing})\n```\n")
    assert form.measure(page).lines == 3 + sum(bool(line.strip()) for line in printed)


def test_what_show_cannot_find_is_said():
    with pytest.raises(ValueError, match=r"show\(Nobody.knows\): it is not found in lib"):
        form.measure(read("```{code-cell}\nshow(Nobody.knows)\n```\n"))


def test_a_cell_that_only_shows_source_is_a_listing():
    page = read(cell("show(number)\nshow(claim)\n") + cell("x = 1\nshow(number)\n") + cell("x = show\n"))
    assert [form.kind(one) for one in form.code_cells(page)] == ["listing", "idea", "idea"]
    shown = PAGE.replace("two = 1 + 1", "from lib.lab.claims import number").replace("four = two + two", "")
    with_listing = shown.replace("## Quiz", cell("show(number)\n") + "## Quiz", 1)
    lines_of = [form.measure(read(text)).lines for text in (shown, with_listing)]
    assert lines_of[1] - lines_of[0] == len([line for line in repr(show(number)).splitlines() if line.strip()])
