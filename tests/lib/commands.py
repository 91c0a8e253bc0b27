"""`lib.train` called as a command that it refuses."""

import pytest

from lib.train import main


def refused(flags, capsys):
    """The one sentence that `python -m lib.train` with these flags ends with, before anything else is printed."""
    with pytest.raises(SystemExit) as left:
        main(flags)
    captured = capsys.readouterr()
    assert left.value.code == 2 and captured.out == "" and captured.err.count("\n") == 1
    return captured.err.removeprefix("python -m lib.train: ").strip()
