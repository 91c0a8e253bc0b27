"""Points go back into the tables of platforms."""

import csv

import pytest

from course.grade.__main__ import main
from course.grade.assignment import Assignment
from course.grade.gradebooks import fill_moodle
from tests.course.homework import RIGHT, SETUP, WRONG, Course

# As Moodle 4 writes it, with the columns that a course may add.
HEAD = (
    'Identifier,"Full name","ID number","Email address",Status,Group,Grade,"Maximum grade","Grade can be changed",'
    '"Last modified (submission)","Last modified (grade)","Feedback comments"'
)
MODIFIED = '"Monday, 15 February 2027, 11:02 PM",-,'


def worksheet(path, *rows, head=HEAD, most="24.00", end="\r\n"):
    """A worksheet; of each row: number, full name, grade, whether it can be changed."""
    lines = [f'"Participant {n}","{name}",,a@x.org,,,{grade},{most},{can},{MODIFIED}' for n, name, grade, can in rows]
    path.write_text(end.join([head, *lines, ""]), newline="")
    return str(path)


def read(path):
    with open(path, newline="") as file:
        return list(csv.reader(file))


def graded(**people):
    """Grades and totals of students, by their names with _ for a space: the number on Moodle, and points."""
    names = {key.replace("_", " "): value for key, value in people.items()}
    return [{"student": name, "number": number} for name, (number, _) in names.items()], {
        name: points for name, (_, points) in names.items()
    }


HOMEWORK = Assignment("hw", "Homework", (), {"03.1": 24})


def test_a_worksheet_of_moodle(tmp_path):
    people = graded(
        Ada_Lovelace=("1234567", 4.5), Kim_22=("22", 3.0), Kim_23=("23", 2), Zoe=("", 0), Li=("", 1), Moe=("9", 5)
    )
    asked = (
        (1234567, "Ada Lovelace", "", "Yes"),
        (22, "Kim", "", "Yes"),
        (23, "Kim", 7, "Yes"),
        (31, "Zoe", "", "Yes"),  # handed nothing in: is on the roster by her full name
        (32, "Li", "", "Yes"),
        (33, "Li", "", "Yes"),  # which of the two it is, nobody can tell
        (9, "Moe", 1, "No"),
        (40, "Stranger", 8, "Yes"),
    )
    before = worksheet(tmp_path / "sheet.csv", *asked)
    lost = fill_moodle(before, tmp_path / "moodle.csv", HOMEWORK, *people)
    assert lost == ["Li", "Moe (Moodle has locked the grade)"]
    old, new = read(before), read(tmp_path / "moodle.csv")
    assert [row[6] for row in new] == ["Grade", "4.5", "3", "2", "0", "", "", "1", "8"]
    assert [row[:6] + row[7:] for row in new] == [row[:6] + row[7:] for row in old], "all else is as it was"
    assert not (tmp_path / "moodle.csv").read_text().startswith("\ufeff")


@pytest.mark.parametrize("change", [str, lambda text: "\ufeff" + text, lambda text: text.replace(",", ";"),
                                    lambda text: text.replace("Maximum grade", "Maximum Grade")])  # fmt: skip
def test_a_worksheet_from_a_spreadsheet_and_of_an_older_moodle(tmp_path, change):
    path = worksheet(tmp_path / "sheet.csv", (5, "Ada", "", "Yes"))
    text = change((tmp_path / "sheet.csv").read_text().replace('"Monday, 15 February 2027, 11:02 PM"', "-"))
    (tmp_path / "sheet.csv").write_text(text)
    assert fill_moodle(path, tmp_path / "moodle.csv", HOMEWORK, *graded(Ada=("5", 20.25))) == []
    assert read(tmp_path / "moodle.csv")[1][6] == "20.25"


def test_what_is_no_worksheet_or_has_other_points(tmp_path):
    people = graded(Ada=("5", 20))
    for head, most, words in (
        ("ID;Vollständiger Name;Bewertung", "24", "has no Identifier. Moodle must be in English"),
        (HEAD.replace('"Grade can be changed"', "x"), "24", "has no Grade can be changed"),
        (HEAD, "100.00", "a maximum grade of 100.00, and Homework has 24 points: set these in Moodle"),
        (HEAD, "-", "a maximum grade of -"),
        ("", "24", "has no Identifier"),
    ):
        path = worksheet(tmp_path / "sheet.csv", (5, "Ada", "", "Yes"), head=head, most=most)
        with pytest.raises(ValueError, match=words):
            fill_moodle(path, tmp_path / "moodle.csv", HOMEWORK, *people)
    assert not (tmp_path / "moodle.csv").exists()


def test_from_moodles_download_to_its_worksheet(tmp_path, capsys):
    course = Course(tmp_path, exercises={"03.1": 4})
    course.hands_in("Ada Lovelace_1234567_assignsubmission_file_", SETUP, RIGHT)
    course.hands_in("Ben Roe_22_assignsubmission_file_", SETUP, WRONG)
    rows = (22, "Ben Roe", "", "Yes"), (1234567, "Ada Lovelace", "", "Yes"), (3, "Cid Poe", "", "Yes")
    sheet = worksheet(tmp_path / "sheet.csv", *rows, most="4.00")
    (tmp_path / "roster.txt").write_text("Ada Lovelace\nBen Roe\nCid Poe\nDora\n")
    more = "--trust", "--roster", str(tmp_path / "roster.txt"), "--moodle", sheet
    assert main(course.command(*more)) == 0
    assert [row[6] for row in read(course.grades / "moodle.csv")] == ["Grade", "0", "4", "0"]
    assert f"3 of 4 students are in {sheet}, without Dora\n" in capsys.readouterr().out
