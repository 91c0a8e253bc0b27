"""Numbers that were typed into the text of a built page, and which of them nothing on the page computes.

    python tools/typed_numbers.py            each page: how many of its numbers are bound to the run
    python tools/typed_numbers.py 03 12      two of them, with the numbers that are not

The problem: a table measures 0.3 ms on each build, and the sentence beside it goes on to say 0.9. The idea: a number in
prose is found, rounded as it is written, among the outputs of its section and the constants of the code beside it, or
book/cited_numbers.toml names its source. What is found in neither way was only typed, and may be wrong.
"""

import ast
import math
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from bs4 import BeautifulSoup, NavigableString

ROOT = Path(__file__).resolve().parents[1]
SITE, CITED = ROOT / "_build" / "html", ROOT / "book" / "cited_numbers.toml"

PREFIXES = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
UNITS = {"%": ("", 0.01), "percent": ("", 0.01)}  # as it is written: its kind and its size
UNITS |= {word: ("", 1000.0**i) for i, word in enumerate(("thousand", "million", "billion", "trillion"), 1)}
UNITS |= {one: ("s", size) for one, size in {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1}.items()}
UNITS |= {
    one + many: ("s", size)
    for one, size in {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "year": 365.25 * 86400}.items()
    for many in ("", "s")
}
UNITS |= {p + "B" + per: ("bytes" + per, size) for p, size in (PREFIXES | BINARY).items() for per in ("", "/s")}
UNITS |= {"byte": ("bytes", 1), "bytes": ("bytes", 1)}
UNITS |= {
    p + f + per: ("FLOP" + per, s) for p, s in PREFIXES.items() for f in ("FLOP", "FLOPs") for per in ("", "/s")
}
NUMBER = re.compile(
    r"(?<![\w.,/§#^])(?<!\w-)(?P<digits>\d{1,3}(?:[,\u2009\u202f\u00a0]\d{3})+|\d+)(?P<part>\.\d+)?(?!\w)(?![.,]?\d)"
    r"(?![\s\u00a0-](?:significant )?bits?\b)"  # of a format
    rf"(?:[\s\u00a0-]?(?P<unit>{'|'.join(sorted(map(re.escape, UNITS), key=len, reverse=True))})(?!\w))?"
)
PLACES = r"(?:issue|chapter|section|part|figure|table|exercise|example|problem|room)s?|appendix|version|§+"
THINGS = r"ranks?|stages?|microbatch(?:es)?|nodes?|GPUs?|units?|layers?|blocks?|steps?"
NAMES = "PyTorch|ZeRO|Llama|Qwen|Phi|Gemma|torch|Python"
NAMED = re.compile(
    rf"\b(?:(?:{PLACES})[\s\u00a0][\w., –]*|(?:{THINGS}|{NAMES})[\s\u00a0](?:[\d, ]+(?:and|to|or)?[\s\u00a0])?)$",
    re.I,
)
YEARS = range(1950, 2031)
GIVEN = re.compile(r"\d\. |\d+ minutes to read")  # of a quiz or of practice, and what the tools count
PROSE = ["p", "li", "td", "th", "dd", "dt", "summary"]
NOT_READ = "script, style, svg:not(.cell svg), .headerlink, .colab, .kick, .option:not(.right), #papers, #key-terms"
OF_THE_PAGE = {"", "quiz", "summary"}  # parts that speak of the whole page


@dataclass(frozen=True)
class Number:
    """A number as it is written, in its unit; where it stands in its text."""

    value: float
    kind: str = ""
    unit: float = 1.0
    decimals: int = 0
    place: tuple[int, int] = (0, 0)

    @property
    def within(self) -> float:
        """How far a value may be away that is written like this: half of its last digit that is not 0, at most 3 %."""
        digits = f"{self.value:.0f}"
        zeros = 0 if self.decimals else len(digits) - len(digits.rstrip("0"))
        return min(0.5 * 10.0 ** (zeros - self.decimals), 0.03 * self.value)

    def is_like(self, other: "Number") -> bool:
        """Whether `other`, computed, may be written like this; a constant of the code only as it stands there."""
        if other.kind == "constant":
            if self.decimals and not other.decimals:
                return False
            units = {self.unit, 1.0} if self.unit == 0.01 else {self.unit}  # percents are written as such, too
            return any(math.isclose(other.value / unit, self.value, rel_tol=1e-9) for unit in units)
        if self.kind == other.kind:
            return abs(other.value * other.unit / self.unit - self.value) < self.within
        units = {1.0, self.unit} if not other.kind else {1.0} if not self.kind else set()  # a table's head has it
        return any(abs(other.value / unit - self.value) < self.within for unit in units)


def numbers(text: str) -> list[Number]:
    """Those that say how much: no year, no place, no name such as GPT-2 or rank 3; from 13 on if they only count.

    A smaller count is a word in most sentences, and has hardly a neighbour within a fifth.
    """
    found = []
    for match in NUMBER.finditer(text):
        value = float(re.sub(r"\D", "", match["digits"]) + (match["part"] or ""))
        counts = not match["unit"] and not match["part"]
        if (counts and (value in YEARS or value <= 12)) or NAMED.search(text[: match.start()][-30:]) or not value:
            continue
        end = match.end("part") if match["part"] else match.end("digits")
        kind, unit = UNITS.get(match["unit"], ("", 1.0))
        found.append(Number(value, kind, unit, len(match["part"] or ".") - 1, (match.start(), end)))
    return found


def constants(source: str) -> list[Number]:
    """The numbers of a piece of code, and what it computes of them alone: 3 * 2**20."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant | ast.BinOp) and not any(
            isinstance(n, ast.Name | ast.Call) for n in ast.walk(node)
        ):
            try:
                value = eval(compile(ast.Expression(node), "", "eval"), {"__builtins__": {}})
            except (TypeError, ValueError, ArithmeticError):
                continue
            if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
                found.append(Number(float(value), "constant", decimals=isinstance(value, float)))
    return found


def sentences(source: str) -> list[str]:
    """What is typed in code of a figure: captions, alternative texts. Answers to a guess are not: most are wrong."""
    tree = ast.parse(source)
    guesses = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Guess"]
    asked = {id(part) for guess in guesses for one in guess.args[1:] for part in ast.walk(one)}
    typed = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in asked)
    return [text for text in typed if isinstance(text, str) and text.count(" ") > 2]


# ---- a built page ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Passage:
    """A typed text, and the numbers that its page computes for it."""

    section: str
    text: str
    computed: list[Number]


def passages(html: str) -> list[Passage]:
    """What is typed on a built page. An output counts in its section, a constant for the texts beside its cell."""
    title = BeautifulSoup(html, "html.parser").select_one("article section")
    for unread in title.select(NOT_READ):
        unread.decompose()
    put_back(title)
    parts = [(part.get("id"), part.extract()) for part in title.find_all("section", recursive=False)]
    told = [(section, *of_part(part)) for section, part in [("", title), *parts]]
    everything = [number for _, _, outputs in told for number in outputs]
    return [
        Passage(section, text, beside + (everything if section in OF_THE_PAGE else outputs))
        for section, texts, outputs in told
        for text, beside in texts
    ]


def put_back(page) -> None:
    """What opens with the line of its section is put back into its cell, beside the texts that it measures."""
    for fold in page.select("details.folded details.folded"):
        for name in fold["class"]:
            if name.startswith("of-"):
                page.find("div", class_=name).append(fold.extract())


def is_block(tag) -> bool:
    return tag.name in PROSE or not {"cell", "highlight"}.isdisjoint(tag.get("class", []))


def of_part(part) -> tuple[list[tuple[str, list[Number]]], list[Number]]:
    """The texts of a part, each with the constants of the cells before and after it; the numbers its cells show."""
    texts, outputs, before, since = [], [], [], []  # `since`: the lists of texts that wait for the next cell
    for block in [one for one in part.find_all(is_block) if not one.find_parent(class_=["cell", "highlight"])]:
        classes = block.get("class", [])
        if "highlight" in classes:
            before = before + constants_of(block)
        elif "cell" in classes:
            code = [one.extract().get_text() for one in block.select(".cell_input")]
            before = [number for source in code for number in constants(source)]
            for beside in since:
                beside += before
            since = []
            if "tag_figure" in classes:
                texts += [(text, before) for source in code for text in sentences(source)]
            for said in block.select("figcaption, title, desc, summary"):
                said.decompose()
            outputs += numbers(block.get_text(" "))
        elif not block.find(PROSE):
            for aside in block.select("code, .math"):
                aside.replace_with(NavigableString(" x "))
            text = " ".join(block.get_text().split())
            if not GIVEN.match(text):
                since.append(list(before))
                texts.append((text, since[-1]))
    return texts, outputs


def constants_of(block) -> list[Number]:
    """Of a listing in the text, which may be no Python."""
    try:
        return constants(block.get_text())
    except SyntaxError:
        return []


# ---- which numbers are bound -----------------------------------------------------------------------------------------


def is_bound(number: Number, text: str, passage: Passage, cited: dict[str, str]) -> bool:
    """Whether the page computes this number of a text, or its source is named."""
    start, end = number.place
    places = (match.span() for one in cited for match in re.finditer(re.escape(one), text))
    named = any(first <= start and end <= last for first, last in places)
    return named or any(number.is_like(one) for one in passage.computed)


def changed(text: str, number: Number) -> tuple[str, Number]:
    """The text with this number a fifth larger, and at least by one in its last digit."""
    start, end = number.place
    last = 10.0**-number.decimals
    written = f"{max(1.2 * number.value, number.value + last):,.{number.decimals}f}"
    value = float(written.replace(",", ""))
    place = start, start + len(written)
    return text[:start] + written + text[end:], Number(value, number.kind, number.unit, number.decimals, place)


def examine(html: str, cited: dict[str, str]) -> tuple[list[str], int, int]:
    """The passages with a number that is not bound; how many numbers there are; how many could change unnoticed."""
    unbound, total, missed = [], 0, 0
    for passage in passages(html):
        text = passage.text
        for number in numbers(text):
            total += 1
            start, end = number.place
            if is_bound(number, text, passage, cited):
                more, larger = changed(text, number)
                missed += is_bound(larger, more, passage, cited)
            else:
                shown = f"{text[max(0, start - 60) : start]}[{text[start:end]}]{text[end : end + 40]}"
                unbound.append(f"{passage.section or 'opening'}: …{shown}…")
    return unbound, total, missed


def cited(page: str) -> dict[str, str]:
    """The passages of a page, and of all pages, whose numbers come from elsewhere, to their sources."""
    sources = tomllib.loads(CITED.read_text(encoding="utf-8"))
    return sources.get("all pages", {}) | sources.get(page, {})


def main(chapters: list[str]) -> int:
    for path in sorted((SITE / "chapters").glob("*.html")):
        if chapters and path.stem.split("_")[0] not in chapters:
            continue
        unbound, total, missed = examine(path.read_text(encoding="utf-8"), cited(path.stem))
        print(f"{path.stem}: {total} numbers, {len(unbound)} not bound, {missed} could change unnoticed")
        print("".join(f"    {one}\n" for one in unbound if chapters), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
