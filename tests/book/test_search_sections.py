"""What the search shows below a page that it found: sentences of its text, with formulas in plain symbols."""

import re

import pytest

from tests.book.book_project import BOOK, build
from tools.browser import serve

SCRIPTS = [(name, {"defer": "defer"}) for name in ("plain_formula.js", "search_sections.js")]
PAGE = """# Pipelines

<p class="kick">The bubble is in the second part.</p>

What does a rank do while it has nothing to compute?

## Bubble

<details class="folded code"><summary>Show it</summary><p>The bubble of a folded cell is one.</p></details>
<button>The bubble is behind this button.</button>
<figure><svg><text>bubble of rank 0</text></svg><p>The bubble is drawn here, and not told.</p></figure>

| | |
|---|---|
| | The bubble of four ranks is large. |

- bubble, in a word

Nobody waits alone. The bubble
is $\\frac{p-1}{m+p-1}$ of a step for $m \\ge 4p$, or 2.5 steps. It `shrinks` with $m$: so

$$\\text{bubble} = 1$$

<details class="option right"><summary>Bubble</summary><p>The bubble of a step is an answer.</p></details>

## Quiz

A bubble, a bubble, a bubble: what is a bubble?

## Schedules

```python
microbatch = 1
```

The next listing is a schedule:

## Deadlock: two ranks

Two ranks wait in `send`. Each holds its message until the other takes it, and neither does.
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pages = {"index": "# Book\n\n```{toctree}\npipelines\n```\n", "pipelines": PAGE}
    shown = {"html_theme": "sphinx_book_theme", "html_js_files": SCRIPTS, "html_show_search_summary": False}
    static = {"html_static_path": [str(BOOK / "static")], **shown}
    with serve(build(tmp_path_factory.mktemp("site"), pages, [], **static)) as address:
        yield address


@pytest.fixture
def shown(browser, site):
    """Link and words of the first result for what was asked."""
    page = browser.new_page()
    page.set_default_timeout(10_000)  # ms

    def ask(words: str) -> tuple[str, str, str]:
        page.goto(f"{site}/search.html?q={words}")
        page.wait_for_selector("#search-results p.context")
        first = page.locator("#search-results li", has=page.locator("a[href*=pipelines]")).first
        context = first.locator("p.context")
        marked = " ".join(context.locator(".highlighted").all_inner_texts())
        return first.locator("a").get_attribute("href").split("/")[-1], context.inner_text(), marked

    yield ask
    page.close()


@pytest.mark.parametrize(
    ("words", "section", "said"),
    [
        ("bubble", "#bubble", "The bubble is (p−1)/(m+p−1) of a step for m ≥ 4p, or 2.5 steps."),
        ("neither", "#deadlock-two-ranks", "Each holds its message until the other takes it, and neither does."),
        ("sending", "#deadlock-two-ranks", "Two ranks wait in send. Each holds its message until"),
        ("listing", "#schedules", "The next listing is a schedule:"),
    ],
)
def test_a_result_shows_the_sentences_that_were_asked_for(shown, words, section, said):
    address, text, marked = shown(words)
    assert address == f"pipelines.html{section}" and text.startswith(said)
    assert marked or words == "sending"


def test_what_only_code_says_leads_to_the_page_and_its_question(shown):
    assert shown("microbatch")[:2] == ("pipelines.html", "What does a rank do while it has nothing to compute?")


@pytest.fixture(scope="module")
def plain(browser):
    page = browser.new_page()
    page.add_script_tag(path=BOOK / "static" / "plain_formula.js")
    yield lambda formulas: page.evaluate("formulas => formulas.map(plainFormula)", formulas)
    page.close()


@pytest.mark.parametrize(
    ("tex", "symbols"),
    [
        (r"\(m = 8\)", "m = 8"),
        (r"2\frac{n-1}{n}S/B", "2 (n−1)/n S/B"),
        (r"\frac{3}{2}(p-1)", "3/2 (p−1)"),
        (r"6 \cdot 6.74 \cdot 10^9", "6 · 6.74 · 10⁹"),
        (r"10^{-9}", "10⁻⁹"),
        (r"y = xW_1^\top", "y = xW₁ᵀ"),
        (r"2\lceil\log_2 n\rceil\,(\alpha + S/B)", "2⌈log₂ n⌉ (α + S/B)"),
        (r"v = \sqrt{(p-1)\,T} = \sqrt 4", "v = √((p−1) T) = √4"),
        (r"\text{end}_{u-1} \approx 3{,}500", "end_u−1 ≈ 3,500"),
    ],
)
def test_a_formula_is_plain_symbols(plain, tex, symbols):
    assert plain([tex]) == [symbols]


def test_every_formula_within_a_line_of_a_page_is_known(plain):
    pages = [p for folder in ("chapters", "solutions", "book") for p in (BOOK.parent / folder).glob("*.md")]
    texts = [re.sub(r"^(```|\$\$).*?^\1$", "", p.read_text(encoding="utf-8"), flags=re.M | re.S) for p in pages]
    formulas = sorted({tex for text in texts for tex in re.findall(r"(?<![$\\\w`])\$([^$`]+)\$(?!\$)", text)})
    assert len(formulas) > 300
    left = {tex: said for tex, said in zip(formulas, plain(formulas), strict=True) if re.search(r"[\\{}]", said)}
    assert left == {}, "book/static/plain_formula.js has no symbols for these"
