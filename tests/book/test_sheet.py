"""The sheet to pin up: what is printed is what lib.cost, the simulator and other frameworks say, and it can be read."""

import importlib
import re
from dataclasses import replace
from io import BytesIO
from itertools import combinations, pairwise

import jupytext
import pytest
from pypdf import PdfReader

from book import axes, sheet, terms
from book.explain.configs import read_foreign
from book.figures import sheet as drawing
from book.sheet_schedules import SCHEDULES
from book.terms import ON_DATA, ON_MODEL, Term
from lib.pipeline.lower import lower
from lib.pipeline.schedules.action import SENDS
from lib.pipeline.simulate import simulate
from tests.book.book_project import BOOK, build, load, soup
from tests.book.drawn import painted, parse

ROOT = BOOK.parent
pages = load("book_sheet")
TECHNIQUES = {one.name: one for one in (*axes.DATA, *axes.MODEL)}
OF_TECHNIQUES = [t for one in TECHNIQUES.values() for t in (*one.memory, *one.sends) if isinstance(t, Term)]
TERMS = [*OF_TECHNIQUES, sheet.ENOUGH, *(term for one in SCHEDULES for term in (one.bubble, one.kept, one.sends))]
OTHER = [  # letters that share no factor with those of the sheet
    {"Ψ": 1e9, "d": 3, "t": 2, "p": 3, "v": 2, "m": 9, "b": 5, "s": 700, "h": 96 * 32, "f": 5_000, "l": 7},
    {"Ψ": 7e10, "d": 5, "t": 16, "p": 5, "v": 3, "m": 25, "b": 2, "s": 1_100, "h": 16 * 64, "f": 16_000, "l": 11},
]


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("term", TERMS, ids=lambda term: f"{term.words} {term.formula}")
def test_each_formula_is_what_lib_cost_says(term):
    for letters in (term.example, *OTHER):
        assert terms.value(term.formula, letters) == pytest.approx(term.by(letters), rel=1e-12)
        assert replace(term, example=letters).said().startswith(f"{term.formula} = ")


def test_a_formula_that_the_library_contradicts_is_not_printed(monkeypatch):
    right = terms.cost.state_bytes
    monkeypatch.setattr(terms.cost, "state_bytes", lambda *args, **how: {**right(*args, **how), "gradient": 0})
    with pytest.raises(ValueError, match="States.*16Ψ is .* and lib.cost says"):
        pages.sides()


@pytest.mark.parametrize("formula", ["2x", "2Ψ!", "import", "p//2 ; 3"])
def test_what_is_no_formula_has_no_value(formula):
    with pytest.raises(ValueError, match="has no value here"):
        terms.value(formula, ON_DATA | {"p": 8})


def test_numbers_of_the_papers():
    """FIGURE 1 of ZeRO with its own letters, and a step of Megatron's table: read there, not computed here."""
    zero = {"Ψ": 7.5e9, "d": 64}
    states = [TECHNIQUES[name].memory[0] for name in ("Data parallelism", "ZeRO-1", "ZeRO-2", "ZeRO-3 (FSDP)")]
    assert [round(terms.value(one.formula, zero) / 1e9, 1) for one in states] == [120, 31.4, 16.6, 1.9]
    assert [terms.value(SCHEDULES[0].bubble.formula, {"p": p, "m": m}) for p, m in ((4, 8), (2, 8))] == [
        3 / 11,
        1 / 9,
    ]


@pytest.mark.parametrize("one", SCHEDULES, ids=lambda one: one.name)
@pytest.mark.parametrize("letters", [ON_MODEL, *OTHER], ids=["sheet", "3 ranks", "5 ranks"])
def test_a_schedule_waits_keeps_and_sends_what_the_sheet_says(one, letters):
    p, m, v = (letters[letter] for letter in "pmv")
    schedule = one.drawn(p, m, v)
    timeline = simulate(schedule)
    assert timeline.bubble == pytest.approx(terms.value(one.bubble.formula, letters))
    stages = schedule.num_stages / p
    most = max(timeline.peak(rank) for rank in range(p)) / stages / p
    whole = terms.value(axes.KEPT, letters)
    assert most * whole == pytest.approx(terms.value(one.kept.formula, letters))
    sent = [sum(action.op in SENDS for action in row) for row in lower(schedule).actions]
    boundaries = sum(a != b for a, b in pairwise(schedule.rank_of))
    assert sum(sent) == 2 * m * boundaries
    x = terms.boundary_bytes(letters)
    assert max(sent) * x <= terms.value(one.sends.formula, letters) * (1 + 1e-12)
    if p > 3:
        assert sent[p // 2] * x == pytest.approx(terms.value(one.sends.formula, letters))


MEASURED = {  # technique → chapter → what its evidence cells compare, by the name in lib.cost
    "Data parallelism": {"03": ["wire_bytes"]},
    "ZeRO-1": {"04": ["zero_wire_bytes", "state_bytes"]},
    "ZeRO-2": {"04": ["zero_wire_bytes", "state_bytes"]},
    "ZeRO-3 (FSDP)": {"05": ["zero_wire_bytes", "state_bytes"]},
    "Recomputation": {"01": ["activation_bytes", "train_flops"]},
    "Tensor parallelism": {"06": ["block_wire_bytes"]},
    "Sequence parallelism": {"07": ["activation_bytes", "wire_bytes"]},
    "Pipeline parallelism": {"08": ["bubble", "wire_bytes"], "09": ["bubble", "kept_by"], "12": ["bubble"]},
}


@pytest.mark.parametrize("name", TECHNIQUES)
def test_the_chapter_compares_it_with_a_measurement(name):
    for chapter, functions in MEASURED[name].items():
        numbers = [int(number) for number in re.findall(r"\d+", TECHNIQUES[name].chapters)]
        assert min(numbers) <= int(chapter) <= max(numbers)
        page = jupytext.read(next((ROOT / "chapters").glob(f"{chapter}_*.md")))
        evidence = "\n".join(c.source for c in page.cells if "evidence" in c.metadata.get("tags", ()))
        assert [one for one in functions if not re.search(rf"\b{one}\b", evidence)] == []


# ---- names -----------------------------------------------------------------------------------------------------------

TORCH = "torch.nn.parallel torch.distributed.optim torch.distributed.fsdp torch.distributed.pipelining".split()
TORCH += ["torch.distributed.pipelining.schedules", "torch.distributed.tensor.parallel"]
NAMED = {  # technique or schedule → the field that `book.explain` reads from its options, and its value
    "ZeRO-1": ("zero", 1),
    "ZeRO-2": ("zero", 2),
    "ZeRO-3 (FSDP)": ("zero", 3),
    "Data parallelism": ("zero", 0),
    "Recomputation": ("recompute", "full"),
    "Tensor parallelism": ("tp", "8"),
    "Sequence parallelism": ("sequence_parallel", True),
    "Pipeline parallelism": ("pp", "8"),
    "Interleaved": ("stages_per_rank", "4"),
}
ASKED = {one.name: one.names for one in (*TECHNIQUES.values(), *SCHEDULES)}


@pytest.mark.parametrize("name", ASKED)
def test_pytorch_has_these_names(name):
    said = ASKED[name][axes.PYTORCH]
    dotted = re.findall(r"\btorch(?:\.\w+)+", said)
    for path in dotted:
        module, _, attribute = path.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute)
    names = re.findall(r"\b(?:[A-Z][A-Za-z0-9]{5,}|fully_shard|parallelize_module)\b", said)
    assert dotted or names
    for one in names:
        assert any(hasattr(importlib.import_module(module), one) for module in TORCH), one


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("framework", [axes.MEGATRON, axes.DEEPSPEED])
def test_the_other_frameworks_read_these_options_so(name, framework, tmp_path):
    said, (field, value) = ASKED[name][framework].replace("\u00a0", " "), NAMED[name]
    words = re.findall(r"--[\w-]+(?: [a-z_]+| \d+)?", said.replace("--recompute-method uniform", ""))
    if framework == axes.DEEPSPEED and "{" in said:
        file = tmp_path / "ds.json"
        file.write_text(f'{{"train_batch_size": 8, {said}}}', encoding="utf-8")
        asked = read_foreign([str(file)])
    elif words:
        more = [" 4"] if name == "Interleaved" else [""]  # the number is the reader's
        asked = read_foreign(" ".join([*words, *more]).split())
        assert asked.framework == framework and asked.notes == []
    else:
        return  # words, or a class of theirs, which `book.explain` does not read
    assert str(asked.found[field]).lower() == str(value).lower()


# ---- what is drawn ---------------------------------------------------------------------------------------------------


def words_of(svg):
    """(words, left, top, right, bottom) of a side, measured in the font that it is broken for."""
    for element, own in painted(parse(svg)):
        if element.tag == "text":
            size, x, y = (float(own[key]) for key in ("font-size", "x", "y"))
            wide = drawing.measured(element.text, size, int(own["font-weight"]))
            yield element.text, x, y - 0.75 * size, x + wide, y + 0.22 * size


@pytest.mark.parametrize("width", [pages.PRINTED, pages.SHOWN, 340.0])
def test_words_stay_inside_and_apart(width):
    for side in pages.drawn(width):
        svg = side.narrow if width == 340.0 else side.svg
        found = list(words_of(svg))
        assert len(found) > 60
        assert [words for words, left, top, right, _ in found if right > width + 1 or left < 0 or top < 0] == []
        touching = [
            (a, b)
            for (a, left, top, right, bottom), (b, x0, y0, x1, y1) in combinations(found, 2)
            if right > x0 + 0.5 and x1 > left + 0.5 and bottom > y0 + 0.5 and y1 > top + 0.5
        ]
        assert touching == []


def test_pictures_end_before_the_words_beside_them():
    for width in (pages.PRINTED, pages.SHOWN):
        for row in (row for side in pages.sides() for row in side):
            for block, share in zip(row.blocks, row.shares, strict=True):
                if isinstance(block, drawing.Picture):
                    assert block.width <= share * (width + drawing.GAP) - drawing.GAP


def test_a_word_for_which_there_is_no_room_is_an_error():
    assert drawing.broken("--eleven-twelve-three", 60, 12.5, 400) == ["--eleven-", "twelve-", "three"]
    with pytest.raises(ValueError, match="wider than 60"):
        drawing.broken("DistributedDataParallel", 60, 12.5, 400)


def test_letters_can_be_read_on_paper():
    """7.5 points at least; the letters of the PDF are smaller than those of its size, because the font is wider."""
    smallest = min(size for size, *_ in drawing.STYLES.values())
    assert drawing.points(smallest, pages.PRINTED) / drawing.WIDER >= 7.5


def test_a_side_that_is_too_long_is_an_error():
    long = drawing.draw_sheet([drawing.Band([[drawing.Line("word")] * 200], (1,))], alt="long", width=800)
    with pytest.raises(ValueError, match="does not fit on A4"):
        drawing.as_svg(long)


def test_the_files(tmp_path):
    pages.write(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([pages.PDF, *pages.SVGS])
    pdf = (tmp_path / pages.PDF).read_bytes()
    read = PdfReader(BytesIO(pdf))
    assert [[round(float(x)) for x in sheet.mediabox[2:]] for sheet in read.pages] == [[595, 842]] * 2
    printed = re.sub(r"\s", "", "".join(one.extract_text() for one in read.pages))
    svgs = [(tmp_path / name).read_text(encoding="utf-8") for name in pages.SVGS]
    written = re.sub(r"\s", "", "".join(re.findall(r">([^<>]+)</text>", "".join(svgs))))
    for term in TERMS:
        said = re.sub(r"\s", "", term.said())
        assert said in printed and said in written
    assert drawing.as_pdf(pages.drawn(pages.PRINTED), pages.TITLE) == pdf, "the same book gives the same bytes"
    for svg in svgs:
        parse(re.sub(r"<style>.*?</style>", "", svg, flags=re.DOTALL))
        assert "prefers-color-scheme: dark" in svg and 'width="210mm" height="297mm"' in svg
        assert set(re.findall(r"https?://[^\"]+", svg)) == {"http://www.w3.org/2000/svg"}


def test_the_home_page_and_the_page_of_the_sheet_have_the_files(tmp_path):
    contents = "\n\n```{toctree}\nbook/sheet\n```\n"
    home = f"# Home\n\nOn [one sheet](book/sheet.md).\n\nOn [a page](other.md).{contents}"
    made = {"index": home, "other": "---\norphan: true\n---\n# Other\n\n[One](book/sheet.md)\n"}
    site = build(tmp_path, {**made, "book/sheet": "# The sheet\n\n```{sheet}\n```\n"}, ["book_sheet"])
    files = [pages.PDF, *pages.SVGS]
    assert [a["href"] for a in soup(site, "index").select("p a[href^=parallel]")] == files
    assert soup(site, "other").select("a[href*=parallel]") == []
    own = soup(site, "book/sheet")
    assert [a["href"] for a in own.select("p a[href^='../parallel']")] == [f"../{name}" for name in files]
    assert all((site / name).is_file() for name in files)
    assert len(own.select("figure.pbh-figure")) == 2
    assert len(own.select("table.quantities tbody tr")) == len(TERMS) - 1


def test_the_first_page_says_where_the_sheet_is():
    assert "(../book/sheet.md)" in (ROOT / "chapters" / "00_start.md").read_text(encoding="utf-8")
    assert "file: book/sheet\n" in (ROOT / "_toc.yml").read_text(encoding="utf-8")
