"""Habits of prose that stop a reader: where a text has them, and how to say it.

python tools/prose.py chapters/03_data_parallelism.md lib/comm.py ...

Each is a pattern, and some of its hits are good English. A page with few hits was read sentence by sentence, and no
more is asked (`make lint`). Captions are prose, so code cells count; the generated set-up cell does not.
Notation is one table for the whole book (book/formulas.md): no hit of a letter that it does not have is good.
"""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
HABITS = {  # a pattern, and what to say in its place
    r"\bwhat\b(?![^.?!]*\?)": "say the noun",
    r"\b(wants?|knows?|asks?|sees?|talks?|speaks?|told|learns?|decides?)\b": "a rank sends, receives, holds, computes",
    r"\b(an)?other\b(?! (rank|half|hand|side|one|two|way|end))": "different, or the noun",
    r"(^|[.?!:)>] )(So|And)\b": "begin with the subject",
    r"\b(optimizer|step|batch|layer|bucket|norm|schedule|block|head|chapter|stage|link|forward|backward"
    r"|unit|gradient|weight|ring|output)'s\b": "the noun first: optimizer state",
    r"\b([Nn]o|[Ss]ome|[Ee]very|[Aa]ny)(body|one)\b": "name the rank, the layer, the reader",
    r"(?<!may )\b(have|has) (\w+ed|cut|shown|done|seen|sent|drawn|come|gone|made|won|begun)\b": "the simple past",
    r"\b(stands?|stood|lies?|lying)\b": "is, holds, the layout of",
    r"\bof (its|their|our|your) own\b": "its own, a separate",
    r"\b(same|first|last|other|new|own|whole|smaller|larger) ones?\b": "the noun",
    r"\bat once\b": "immediately, in one call, at the same time",
    r"\b(behind|in front of)\b": "after, before",
    r"(bytes|numbers|units?|stages?|backward|message|gather|times) a (\w+)\b|\ba second\b": "per",
    r"\bmoment\b": "time, temporary, start",  # Adam has moments
    r", as (it|they|each|the|its|all|no|nothing|nobody|there|only|that|what|two|ranks|gradients"
    r"|microbatches|queries)\b": "because",
    r"\b(that|those) of\b": "the noun again",
    r", which (is|are|was|were)\b": "that is, or a new sentence",
    r"\b(inside of|in turns|for ever|once more|mend|complains?|and else|in hand"
    r"|at hand)\b": "inside, alternately, forever, again, fix, otherwise",
    r"\b(go|goes|gone|come|comes|came) back\b": "run backward, return",
    r"\b(is|are|was|were|be|been) (already |not |still |all )?there\b(?! (a|an|any|no|is|are|some"
    r"|for )\b)": "is allocated, exists",
    r"(^|[.?!:)>] )(Of|Left|Compared|Whole|Below|Behind|Beyond|With it) ": "subject first",
    r", too\b": "also",
    r"(^|[.?!:)>] )That is\b": "cut it",
    r"\b(whatever|however (many|much|long|large))\b": "any, regardless of",
    r"\b(names the mistake|fresh numbers)\b": "tells you which mistake; new random inputs",
    r"\b[Bb]esides?\b": "next to, see also, except",
    r"\b(under way|on (its|the|their) way)\b": "in flight",
    r"\w only[.,;:)]": "only before what it limits",
    r"\b[Ww]hoever\b|(^|[.] )Who (?![^.?!]*\?)": "a name",
    r"\b(but for|nothing but|in (the )?place of)\b": "except for, instead of",
    r"\blets? .{0,20}go\b|\bgiv(e|es|en) .{0,18}back\b": "free",
    r"half as \w+ again|\b(is|are|as|about|takes?|hides|sends?) as (much|many|long|good|fast"
    r"|short)\b(?! as)": "complete the comparison",
    r"\bof which\b": "a new sentence",
    r"\bby (itself|themselves)\b": "automatically, alone, elementwise",
    r"\b(of|than|as) before\b": "above, earlier",
    r"\b(warm-up|cool-down)s?\b": "warmup, cooldown",
}
NOTATION = {  # inside a formula, and what the book writes
    r"(?<![\\\w])N\b": "n ranks; Ψ parameters",
    r"(?<![\\\w])[PR]\b(?!_)": "p pipeline stages, d data-parallel ranks",
    r"(?<![\\\w])(M\b(?!_)|K\b(?!\^))": "m microbatches",
    r"(?<![\\\w])L\b": "l layers",
    r"(?<![\\\w])(dp|tp|pp)\b": "d, t, p",
    r"\bt_[FBIW]\b|\bt\(": "T_F, T(S)",
    r"\\beta\b|β": "B, bandwidth",
}
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$", re.DOTALL)
SETUP = re.compile(r"^```\{code-cell\} ipython3\n:tags: \[setup, remove-cell\].*?^```$", re.DOTALL | re.MULTILINE)
ROOMS = re.compile(r"^<!-- rooms: .*?^<!-- end of the rooms -->$", re.DOTALL | re.MULTILINE)  # checked in their files


MOST_HITS = 12  # of a file; most of these are good English


class Hit(NamedTuple):
    line: int
    words: str
    better: str


def habits(text: str) -> list[Hit]:
    lines = ROOMS.sub(_blank, SETUP.sub(_blank, text)).splitlines()
    return [
        Hit(number, line[max(0, found.start() - 30) : found.end() + 30], better)
        for number, line in enumerate(lines, 1)
        for pattern, better in HABITS.items()
        for found in re.finditer(pattern, line)
    ]


def words_of(code: str) -> str:
    """A module's docstrings, comments and strings of several words, each on its line; all else is blank."""
    kept = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            kept.update(range(node.lineno, node.end_lineno + 1))
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    kept.update(token.start[0] for token in tokens if token.type == tokenize.COMMENT)
    return "\n".join(line if number in kept else "" for number, line in enumerate(code.splitlines(), 1))


def wrong_letters(text: str) -> list[Hit]:
    prose = re.sub(r"^```.*?^```$", _blank, text, flags=re.DOTALL | re.MULTILINE)
    return [
        Hit(prose.count("\n", 0, formula.start()) + 1, formula[0], better)
        for formula in FORMULA.finditer(prose)
        for pattern, better in NOTATION.items()
        if re.search(pattern, re.sub(r"\\(text|mathrm)\{[^}]*\}", "", formula[1] or formula[2]))
    ]


def _blank(found: re.Match) -> str:
    return "\n" * found[0].count("\n")


def all_files() -> list[Path]:
    pages = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("book/library/*.*"))
    folders = (ROOT.glob(f"{folder}/*.md") for folder in ("chapters", "solutions", "book"))
    code = (ROOT.glob(f"{folder}/**/*.py") for folder in ("lib", "course", "book/figures"))
    return sorted({*pages, *(path for found in (*folders, *code) for path in found)})


def main(arguments: list[str]) -> int:
    """Print the hits of these files; with `--check`, of those that have too many, of all."""
    check = arguments == ["--check"]
    failed = 0
    for path in all_files() if check else map(Path, arguments):
        text = path.read_text(encoding="utf-8")
        found, letters = (habits(words_of(text)), []) if path.suffix == ".py" else (habits(text), wrong_letters(text))
        wrong = len(found) > MOST_HITS or bool(letters)
        failed += wrong
        if wrong or not check:
            for hit in sorted(found + letters):
                print(f"{path}:{hit.line}: …{hit.words}…  → {hit.better}")
            print(f"{path}: {len(found)} habits (at most {MOST_HITS}), {len(letters)} wrong letters (none)")
    return check and bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
