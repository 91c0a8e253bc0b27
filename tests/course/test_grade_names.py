"""Whose notebook a file is, and which is the newest, by the names that students, Canvas and Moodle give."""

import os

import pytest

from course.grade.submissions import find_submissions
from tests.course.homework import write_notebook


def found(folder, *names):
    """Student -> submission, of notebooks with these names, each a thousand seconds newer than the one before."""
    for age, name in enumerate(names):
        write_notebook(folder / name)
        os.utime(folder / name, (1.7e9 + 1000 * age,) * 2)
    return {one.student: one for one in find_submissions(str(folder))}


@pytest.mark.parametrize(
    "older",
    ["hw1_11_20_draft", "hw1_2026_11_20_draft", "hw1_20261120_1530_draft", "hw1_99_100_draft", "doeann_12345_678_hw"],
)
def test_a_number_in_the_name_of_a_draft_does_not_make_it_the_newest(tmp_path, older):
    """Even where it is like Canvas' number of an upload: a number against a time says nothing."""
    one = found(tmp_path, f"ada/{older}.ipynb", "ada/hw1.ipynb")["ada"]
    assert [path.stem for path in one.paths] == [older, "hw1"]


def test_of_files_of_canvas_in_a_students_folder_the_number_tells(tmp_path):
    one = found(tmp_path, "ada/doeada_12345_679_hw-1.ipynb", "ada/doeada_12345_678_hw.ipynb")["ada"]
    assert [path.name[13:16] for path in one.paths] == ["678", "679"]


@pytest.mark.parametrize(
    "date",
    [
        "2026_11",
        "11_20",
        "11_2026",
        "2026_11_20",
        "01_09",
        "01_10",
        "1_09",
        "20261120_1530",
        "20261120_153059",
        "1_2",
    ],
)
def test_a_date_in_a_name_is_no_number_of_canvas(tmp_path, date):
    """Two students, and a third on another day."""
    other = date[:-1] + str((int(date[-1]) + 1) % 10 or 1)
    names = [f"hw1_{date}_ada", f"hw1_{date}_ben", f"hw1_{other}_cid"]
    assert [*found(tmp_path, *(f"{name}.ipynb" for name in names))] == sorted(names), other


def test_canvas_gives_a_number_of_an_upload_to_one_file(tmp_path):
    """Names with two numbers that are no date."""
    people = found(tmp_path, "hw1_500_77_ada.ipynb", "hw1_500_77_ben.ipynb", "doecid_500_78_hw1.ipynb")
    assert [*people] == ["doecid", "hw1_500_77_ada", "hw1_500_77_ben"] and people["doecid"].number == "500"


@pytest.mark.parametrize("form", ["{}_assignsubmission_file_/hw1.ipynb", "{}_assignsubmission_file/a/hw1.ipynb",
                                  "{}_assignsubmission_file_hw1.ipynb"])  # fmt: skip
def test_names_of_moodle(tmp_path, form):
    """With folders, as Moodle 4 and 5 write them, and without; an answer typed into Moodle beside a notebook."""
    people = "Ada Lovelace_1234567", "Kim Min-jun_22", "Kim Min-jun_23", "李明_9"
    (tmp_path / "Ada Lovelace_1234567_assignsubmission_onlinetext_").mkdir()
    (tmp_path / "Ada Lovelace_1234567_assignsubmission_onlinetext_" / "onlinetext.html").write_text("See the file.")
    (tmp_path / "Zoe Poe_8_assignsubmission_onlinetext_onlinetext.html").write_text("I was ill.")
    one = found(tmp_path, *map(form.format, people))
    assert [*one] == ["Ada Lovelace", "Kim Min-jun_22", "Kim Min-jun_23", "Zoe Poe", "李明"]
    assert [s.number for s in one.values()] == ["1234567", "22", "23", "8", "9"]
    assert [len(s.paths) for s in one.values()] == [1, 1, 1, 0, 1] and one["Ada Lovelace"].others == ()
    assert one["Zoe Poe"].others == ("Zoe Poe_8_assignsubmission_onlinetext_onlinetext.html",)


def test_moodle_without_names(tmp_path):
    """Anonymous marking."""
    names = (f"Participant_{number}_assignsubmission_file_/hw1.ipynb" for number in (31, 32))
    assert [*found(tmp_path, *names)] == ["Participant_31", "Participant_32"]
