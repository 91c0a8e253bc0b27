"""The form of a page, counted in its source: the kinds of its cells, its size, the minutes it takes, what breaks it.

    python tools/page_form.py            the size of each page

A page is in this form as soon as one of its cells has the tag `evidence`; other pages are left as they are. Counted is
what a reader sees before anything is opened; what stands under *Going deeper* is not.
"""

import ast
import math
import re
import symtable
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import jupytext

# A kind of cell whose code is folded, to the words it is folded under. All but a listing are named by a tag of the
# cell; a cell without such a tag shows an idea.
KINDS = {
    "evidence": "How this was measured",
    "figure": "How this was drawn",
    "setup": "Imports",
    "plain": "Plain PyTorch, which any reader could write",
    "listing": "Show this yourself",
}
PACKAGES = ("lib", "course", "book")
OLD_TAGS = {"hide-input", "remove-input"}  # they hide code without saying what it is
MOST = {"words": 3100, "lines of visible code": 80, "minutes to read": 40}
MOST_LINES_OF_AN_IDEA = 25
# What fitted two readers with a watch: a word, a line of code, a figure, a player or Explorer, a guess, a question of a
# quiz. A problem is practice, and estimated.
WORDS_A_MINUTE, LINE_S, FIGURE_S, PLAYER_S, GUESS_S, QUESTION_S, PROBLEM_S = 150, 8, 45, 120, 60, 45, 180
PRACTICE, QUIZ, NOT_READ = ("## Worked examples", "## Practice"), "## Quiz", ("## Key terms", "## Going deeper")

LABELS = "# Measured:", "# Modelled:", "# Emulated:"
PLAYERS = "Explorer", "workbench"
FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
HIDDEN = re.compile(r'(?<=</summary>).*?(?=</details>)|<a class="colab".*?</a>', re.DOTALL)
ONE_WORD = re.compile(r"\$\$.*?\$\$|\$[^$]+\$|`[^`]+`", re.DOTALL)
MARKUP = re.compile(r"</?[a-z][^>]*>|\]\([^)]*\)")
GUESS = re.compile(r"^> \*\*Guess before you read on\.\*\*.*(?:\n>.*)*", re.MULTILINE)
OPTIONS = re.compile(r"(?:^> <details class=\"option\">.*\n?)+", re.MULTILINE)  # one question's, a line each
TEXT = re.compile(r"</summary>(.*)</details>")
STATED = re.compile(r"^\d+ minutes to read(?:, \d+ to practise)?", re.MULTILINE)


def tags(cell) -> set[str]:
    return set(cell.metadata.get("tags", []))


def kind(cell) -> str:
    """What is folded, and how; `generated` is off the page, an `answer` is folded whole, all else is an `idea`.

    A `listing` does nothing but `show(...)` some of the library's source: its output is what one reads.
    """
    named = {"remove-cell": "generated", "hide-cell": "answer"} | {tag: tag for tag in KINDS if tag != "listing"}
    untagged = "listing" if len(calls(cell, "show")) == len(ast.parse(cell.source).body) > 0 else "idea"
    return next((name for tag, name in named.items() if tag in tags(cell)), untagged)


def in_form(notebook) -> bool:
    return any(kind(cell) == "evidence" for cell in code_cells(notebook))


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


# ---- how large a page is ---------------------------------------------------------------------------------------------


@dataclass
class Size:
    """What a reader has before them when nothing is opened."""

    words: int = 0
    lines: int = 0  # of code, but for empty ones
    figures: int = 0
    players: int = 0
    guesses: int = 0
    questions: int = 0
    problems: int = 0

    @property
    def minutes(self) -> int:
        """To read the page, without its problems."""
        things_s = LINE_S * self.lines + FIGURE_S * self.figures + PLAYER_S * self.players
        things_s += GUESS_S * self.guesses + QUESTION_S * self.questions
        return math.ceil(self.words / WORDS_A_MINUTE + things_s / 60)

    @property
    def stated(self) -> str:
        practice = f", {self.problems * PROBLEM_S // 60} to practise" if self.problems else ""
        return f"{self.minutes} minutes to read{practice}"


def core(notebook) -> Iterator[tuple[str, object]]:
    """Each code cell, and each text with the heading of the part it stands in; without what is looked up later."""
    heading = ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for part in re.split(r"^(?=## )", cell.source, flags=re.MULTILINE):
                heading = part.splitlines()[0] if part.startswith("## ") else heading
                if heading not in NOT_READ:
                    yield heading, part
        elif cell.cell_type == "code" and heading not in NOT_READ:
            yield heading, cell


def measure(notebook) -> Size:
    size = Size()
    for heading, part in core(notebook):
        if isinstance(part, str):
            if heading == QUIZ or heading in PRACTICE:
                asked = len(re.findall(r"^\*\*\d+\.", part, re.MULTILINE))
                size.questions += asked if heading == QUIZ else 0
                size.problems += asked if heading in PRACTICE else 0
                continue
            size.words += words(part.partition("\n### Papers")[0])
            size.lines += sum(code_lines(block) for block in FENCE.findall(HIDDEN.sub("", part)))
            size.guesses += len(GUESS.findall(part))
        elif kind(part) in ("idea", "listing"):
            size.lines += code_lines(part.source) if kind(part) == "idea" else 0
            size.lines += sum(printed_lines(call, notebook) for call in calls(part, "show"))
        elif kind(part) == "figure" and "remove-output" not in tags(part):
            players = any(calls(part, name) for name in PLAYERS) or "play_" in part.source
            size.players += players
            size.figures += not players
            size.guesses += len(calls(part, "Guess"))
    return size


def words(text: str) -> int:
    """Of Markdown: a formula and a piece of code are one word each, the address of a link is none."""
    return sum(any(c.isalnum() for c in word) for word in plain(text).split())


def plain(text: str) -> str:
    """Markdown without its code blocks, folds and addresses; a formula and a piece of code are an x."""
    return MARKUP.sub(" ", ONE_WORD.sub(" x ", FENCE.sub("", HIDDEN.sub("", text))))


def code_lines(source: str) -> int:
    return sum(bool(line.strip()) for line in source.splitlines())


def calls(cell, name: str) -> list[ast.Call]:
    nodes = ast.walk(ast.parse(cell.source))
    return [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", None) == name]


# ---- what `show(...)` prints -----------------------------------------------------------------------------------------


def printed_lines(call: ast.Call, notebook) -> int:
    """Lines of the source that `show(thing)` prints on this page: its place, and docstrings cut to their first line.

    Raises:
        ValueError: the page imports no such thing from the book's packages.
    """
    from book.figures.show import show  # only pages that show something need torch

    thing = ast.unparse(call.args[0])
    first, names = thing.partition(".")[0], {}
    nodes = [node for cell in code_cells(notebook) for node in ast.walk(ast.parse(cell.source))]
    try:
        for node in nodes:
            of_the_book = isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] in PACKAGES
            if of_the_book and first in [alias.asname or alias.name for alias in node.names]:
                exec(ast.unparse(node), names)
        return code_lines(repr(show(eval(thing, names))))
    except (NameError, AttributeError, ImportError):
        raise ValueError(f"show({thing}): it is not found in lib, so its lines cannot be counted") from None


# ---- what the form asks ----------------------------------------------------------------------------------------------


def problems(notebook) -> list[str]:
    """Where a page in this form breaks it, a sentence each; none for a page that is not."""
    if not in_form(notebook):
        return []
    size = measure(notebook)
    counted = {"words": size.words, "lines of visible code": size.lines, "minutes to read": size.minutes}
    found = [f"{n} {what}, at most {MOST[what]}" for what, n in counted.items() if n > MOST[what]]
    found += hidden_names(notebook)
    found += not_plain(notebook)
    for cell in notebook.cells:
        found += [problem for guess in GUESS.findall(cell.source) for problem in problems_of_guess(guess)]
    for cell in code_cells(notebook):
        name = next((line for line in cell.source.splitlines() if line.strip()), "an empty cell")
        found += [f"{name}: {problem}" for problem in problems_of_cell(cell)]
        if kind(cell) == "idea" and (lines := code_lines(cell.source)) > MOST_LINES_OF_AN_IDEA:
            found.append(f"{name}: {lines} lines of an idea, at most {MOST_LINES_OF_AN_IDEA}")
    return found


def hidden_names(notebook) -> Iterator[str]:
    """Names that a visible cell uses and only a folded one has defined: a reader looks for them in vain."""
    visible, folded = set(), set()
    for cell in code_cells(notebook):
        if kind(cell) in ("generated", "answer"):
            continue
        table = symtable.symtable(cell.source, "cell", "exec")
        defined = {name.get_name() for name in table.get_symbols() if name.is_assigned() or name.is_imported()}
        if kind(cell) in ("idea", "listing") and (missing := (globals_of(table) & folded) - visible - defined):
            first = next(line for line in cell.source.splitlines() if line.strip())
            yield f"{first}: {', '.join(sorted(missing))}: defined only in a folded cell above"
        (folded if kind(cell) in ("evidence", "figure") else visible).update(defined)


def not_plain(notebook) -> Iterator[str]:
    """Folded as plain PyTorch, and uses a name that the page imports from the book's packages."""
    imports = [
        node
        for cell in code_cells(notebook)
        for node in ast.parse(cell.source).body
        if isinstance(node, ast.ImportFrom)
    ]
    of_book = [node for node in imports if node.module.partition(".")[0] in PACKAGES]
    names = {alias.asname or alias.name for node in of_book for alias in node.names}
    for cell in code_cells(notebook):
        used = globals_of(symtable.symtable(cell.source, "cell", "exec")) & names
        if kind(cell) == "plain" and used:
            first = next(line for line in cell.source.splitlines() if line.strip())
            yield f"{first}: it is no plain PyTorch, with {', '.join(sorted(used))} of the book"


def globals_of(table: symtable.SymbolTable) -> set[str]:
    """Names of the page that a cell reads, in its functions too."""
    own = {name.get_name() for name in table.get_symbols() if name.is_referenced() and name.is_global()}
    if table.get_type() == "module":
        own = {name.get_name() for name in table.get_symbols() if name.is_referenced()}
    return own.union(*(globals_of(child) for child in table.get_children()))


def problems_of_guess(guess: str) -> Iterator[str]:
    """A guess can be pressed: each of its questions has options, one of them right, and each says why."""
    rows = OPTIONS.findall(guess)
    if not rows:
        yield f"{guess.splitlines()[0]}: a guess without options"
    for row in rows:
        texts = TEXT.findall(row)
        right = sum(bool(re.match(r"Right\b", text)) for text in texts)
        if right != 1 or not 3 <= len(texts) <= 5 or not all(texts):
            yield f"{row.splitlines()[0]}: {len(texts)} options, {right} right; 3 to 5, one right, and each says why"


def measures_time(cell) -> bool:
    """Whether a claim is given a function to call, as times are."""
    defined = {node.name for node in ast.parse(cell.source).body if isinstance(node, ast.FunctionDef)}
    measured = [ast.unparse(arg) for claim in calls(cell, "claim") for arg in claim.args[2:3]]
    functions = (text in defined or text.startswith(("lambda", "partial(")) for text in measured)
    return any(functions) or bool(calls(cell, "Rehearsals"))


def problems_of_cell(cell) -> Iterator[str]:
    of_kind, tree = kind(cell), ast.parse(cell.source)
    if old := tags(cell) & OLD_TAGS:
        yield f"{', '.join(sorted(old))} hides code; say what it is: {', '.join(KINDS)}"
    if len(tags(cell) & KINDS.keys()) > 1:
        yield "a cell is of one kind"
    if "open" in tags(cell) and of_kind != "evidence":
        yield "open goes with evidence"
    if of_kind == "evidence" and not calls(cell, "claim"):
        yield "evidence without a claim"
    if of_kind == "evidence" and not cell.source.startswith(LABELS):
        yield f"evidence begins with a sentence: {', '.join(LABELS)} ..."
    if of_kind == "evidence" and "alone" not in tags(cell) and measures_time(cell):
        yield "it measures a time, which other cells disturb: tag it alone"
    if of_kind in ("idea", "figure", "setup", "plain") and calls(cell, "claim"):
        yield "a claim stands in a cell with the tag evidence"
    if of_kind == "setup" and not all(isinstance(node, ast.Import | ast.ImportFrom) for node in tree.body):
        yield "it holds more than imports"
    if of_kind != "idea":
        return
    keywords = {word.arg for node in ast.walk(tree) if isinstance(node, ast.Call) for word in node.keywords}
    if keywords & {"caption", "alt"} or calls(cell, "Explorer"):
        yield "a picture is made in a cell with the tag figure"


def state_minutes(notebook) -> None:
    """Write the minutes that a page in this form takes to where it states them, in its first cell."""
    if not in_form(notebook):
        return
    title = notebook.cells[0]
    title.source, stated = STATED.subn(measure(notebook).stated, title.source)
    if stated != 1:
        raise ValueError('its first cell has one line that begins with "NN minutes to read"; the number is put in')


# ---- figures of size, to look at and not to aim at -------------------------------------------------------------------


def prose(notebook) -> str:
    """The sentences of a page's core: no code, no formula, no address of a link, no question."""
    parts = [
        part.partition("\n### Papers")[0]
        for heading, part in core(notebook)
        if isinstance(part, str) and heading not in (*PRACTICE, QUIZ)
    ]
    return plain("\n".join(parts))


def ideas(notebook) -> int:
    """Sections with code or a picture of their own."""
    shown = [part for _, part in core(notebook) if isinstance(part, str) or kind(part) in ("idea", "figure")]
    return sum(
        isinstance(part, str) and "\n## " in f"\n{part}" and not isinstance(after, str)
        for part, after in pairwise(shown)
    )


def main() -> int:
    head = "words", "lines", "minutes", "numbers/100", "brackets", "ideas"
    print(f"{'page':<24}" + "".join(f"{name:>14}" for name in head))
    for path in sorted(Path(__file__).resolve().parents[1].glob("chapters/*.md")):
        notebook = jupytext.read(path)
        size, text = measure(notebook), prose(notebook)
        digits = len(re.findall(r"(?<![\w.,-])\d[\d.,]*", text))
        density = f"{100 * digits / size.words:.1f}"
        row = size.words, size.lines, size.minutes, density, text.count("("), ideas(notebook)
        print(f"{path.stem:<24}" + "".join(f"{value:>14}" for value in row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
