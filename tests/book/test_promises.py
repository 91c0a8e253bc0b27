"""What the pages say of the book and tell to type is so: no chapter that is not there, no command that cannot work."""

import re
from pathlib import Path

import pytest

from lib.cost import hardware, sizes

ROOT = Path(__file__).resolve().parents[2]


def read(path: str | Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


PAGES = [
    ROOT / "README.md",
    *(p for folder in ("chapters", "solutions", "book") for p in sorted(ROOT.glob(f"{folder}/*.md"))),
]
CHAPTERS = [ROOT / f"{name}.md" for name in re.findall(r"^ {6}- file: (chapters/\w+)", read("_toc.yml"), re.M)]
NUMBERS = [int(path.name[:2]) for path in CHAPTERS if re.match(r"\d\d_", path.name)]  # the workshop has none


def named(text: str) -> set[int]:
    """The chapters that a text names: `chapter 3`, `chapters 4 and 5`, `chapters 8 to 10`."""
    found: set[int] = set()
    for numbers in re.findall(r"\b[Cc]hapters? (\d+(?:(?:, | and | to |–)\d+)*)", text):
        for first, last in re.findall(r"(\d+)(?:(?: to |–)(\d+))?", numbers):
            found |= set(range(int(first), int(last or first) + 1))
    return found


def test_how_chapters_are_named():
    text = "Chapter 1, chapters 4 and 5, [chapter 03](x), chapters 8 to 10. In 2019 a chapter"
    assert sorted(named(text)) == [1, 3, 4, 5, 8, 9, 10]


def test_chapters_are_numbered_without_a_gap():
    assert NUMBERS == list(range(1, len(NUMBERS) + 1)) and len(NUMBERS) > 10


@pytest.mark.parametrize("folder", [PAGES, sorted(ROOT.glob("lib/**/*.py"))], ids=["pages", "lib"])
def test_no_file_names_a_chapter_that_is_not_there(folder):
    found = []
    for path in folder:
        text = read(path)
        links = re.findall(r"\[[Cc]hapter (\d+c?)\]\([\w./]*?0?(\d+c?)_", text)
        wrong = [f"chapter {n}" for n in named(text) - set(NUMBERS)] + [link for link in links if link[0] != link[1]]
        wrong += re.findall(r"being written|(?:will|yet to|to) be written\b|coming soon", text)
        found += [(path.relative_to(ROOT).as_posix(), what) for what in wrong]
    assert found == []


def test_the_first_page_tells_of_every_chapter():
    assert named(read("chapters/00_start.md")) == set(NUMBERS)


def test_the_first_page_counts_as_the_library_does():
    llama, h100, b200 = sizes.MODELS["405B"], hardware.DEVICES["H100 80 GB"], hardware.DEVICES["B200 180 GB"]
    numbers = [
        f"{llama.num_parameters // 10**9} billion parameters",
        f"more than {2 * llama.num_parameters // 10**11 * 100} GB",
        f"a B200 GPU has {b200.memory_bytes / 1e9:g} GB",
        f"NVLink carries {h100.link_Bps / 1e9:g} GB/s",
        f"the network between nodes often carries {h100.network_Bps / 1e9:g} GB/s for each GPU.",
    ]
    assert [number for number in numbers if number not in read("chapters/00_start.md")] == []


def test_each_chapter_leads_to_the_next_and_the_last_promises_none():
    assert [path.name for path in CHAPTERS if "\n**Next.**" in read(path)] == [path.name for path in CHAPTERS[:-1]]


def test_commands_name_the_python_that_has_the_library():
    """A plain `python` has no torch, unless somebody has activated .venv."""
    command = re.compile(r"(?<!\.venv/bin/)\b(?:python|torchrun) .*-m lib\..*")
    assert [(path.name, line) for path in PAGES for line in command.findall(read(path))] == []


def test_each_exercise_begins_with_a_link_to_a_section_of_its_chapter():
    found = []
    for path in sorted(ROOT.glob("solutions/*.md")):
        more = rf"{path.stem[:2]}[bc]_\w+"
        begins = rf"From the (?:sections?|room) \[[^]]+\]\(\.\./chapters/({path.stem}|{more})\.ipynb#"
        tasks = re.findall(r'^## (\d+\. .+)\n\n(?:<p class="effort">.+</p>\n\n)?(.+)', read(path), re.M)
        assert tasks, path
        found += [(path.name, title) for title, text in tasks if not re.match(begins, text)]
    assert found == []


def anchors(text: str) -> set[str]:
    """Where a link may lead in a page: its headings, as the built book names them."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^##+ (.+)$", prose.lower(), re.M)
    return {re.sub(r"[^\w -]", "", title).replace(" ", "-") for title in titles}


def lost(path: Path, text: str) -> list[str]:
    """The links of a page to a section that no page has. Exercises have the sections of their solutions."""
    links = re.findall(r"\]\((?!https?:)([^\s()#]*)#([^\s()]+)\)", text)
    pages = [re.sub(r"\.ipynb$", ".md", page).replace("exercises/", "solutions/") for page, _ in links]
    return [
        f"{page}#{section}"
        for (page, section), source in zip(links, pages, strict=True)
        if section not in anchors(read(path.parent / source) if source else text)
    ]


def test_every_link_to_a_section_leads_to_one():
    assert {path.name: found for path in PAGES if (found := lost(path, read(path)))} == {}


def test_a_link_to_a_section_that_is_not_there_is_seen():
    page = ROOT / "chapters/04_zero.md"
    right = "[a](#here) [b](01_memory.ipynb#practice) [c](../exercises/04_zero.ipynb#1-cut-a-tensor-into-shards)"
    assert lost(page, f"## Here\n\n{right}") == []
    assert lost(page, f"```\n## Here\n```\n{right.replace('to-s', 'to_s')} [d](01_memory.ipynb#nowhere)") == [
        "#here",
        "../exercises/04_zero.ipynb#1-cut-a-tensor-into_shards",
        "01_memory.ipynb#nowhere",
    ]
