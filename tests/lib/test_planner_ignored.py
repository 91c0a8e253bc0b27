"""Options that would change nothing, or that mean nothing here, are refused; and layouts that a search does not try."""

import pytest

from lib.cost.hardware import GPUS
from lib.planner import Cluster, Training, best_layouts
from lib.planner.__main__ import main
from lib.planner.report_search import others_text
from lib.planner.search import faster_or_slower
from lib.planner.stacks import stack_for
from lib.planner.training import PRESET_MODELS

ON_8 = "--model gpt2 --gpus 8"


def ask(question, capsys):
    main(question.split())
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (f"{ON_8} --sweep batch --tokens 1T --price 2", "leave out --tokens and --price"),
        (f"{ON_8} --sweep batch --best 5", "--sweep prints a row for each value: leave out --best"),
        (f"{ON_8} --sweep batch --microbatch 2 --stages-per-rank 2", "leave out --microbatch and --stages-per-rank"),
        (f"{ON_8} --every 2", "--every 2 recomputes one block in so many: give --recompute, such as full"),
        (f"{ON_8} --every 13 --recompute full", "--every 13 recomputes no block of 12: choose 12 or less"),
        (f"{ON_8} --loss-chunks 1025", "--loss-chunks 1025 of 1024 tokens on a rank: choose 1024 or less"),
        ("--model mixtral-8x7b --gpus 8 --best 5", "--best is for a search by seconds"),
        ("--model mixtral-8x7b --gpus 8 --kv-heads 4", "--kv-heads cannot be changed"),
        ("--model mixtral-8x7b --gpus 8 --stages-per-rank 2", "--stages-per-rank 2 is not counted with experts"),
    ],
)
def test_an_option_without_effect_is_refused(options, words, capsys):
    with pytest.raises(SystemExit):
        main(options.split())
    assert words in capsys.readouterr().err


def test_the_largest_that_mean_something_are_taken(capsys):
    assert "recompute full, in one block of 12" in ask(f"{ON_8} --every 12 --recompute full", capsys)
    assert "the loss in 1024 pieces" in ask(f"{ON_8} --loss-chunks 1024", capsys)


def test_a_layout_that_the_search_does_not_try_may_be_faster(capsys):
    """Microbatches of 16 sequences: the search has 1, 2, 4 and 8."""
    said = ask(f"{ON_8} --microbatch 16", capsys)
    assert "% faster, and the search does not try it" in said
    assert "as fast as the fastest that was found" in ask(f"{ON_8} --microbatch 8", capsys)


def test_no_layout_is_slower_by_nothing(capsys):
    said = ask("--model llama3-8b --gpus 8 --gpu mi300x", capsys)
    assert "GB, 58.22 s: as fast" in said and "0.0% slower" not in said


def test_a_tight_layout_that_is_faster_says_so():
    """A search prints it after all that have the headroom."""
    run = Training(PRESET_MODELS["gpt2"], Cluster(GPUS["h100"], 8), stack_for("megatron", "h100"), 64)
    first = best_layouts(run)[0]
    quick = first._replace(seconds=first.seconds._replace(matmuls=first.seconds.matmuls / 2))
    by = first.seconds.total / quick.seconds.total - 1
    assert faster_or_slower(first, quick) == f"{by:.1%} faster"
    tight = quick._replace(memory=first.memory._replace(gathered=75e9 - first.memory.total))
    assert others_text([first, tight], None, "", 80e9, 0.1).endswith(f", tight: {by:.1%} faster")
