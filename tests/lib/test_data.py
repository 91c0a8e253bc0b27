"""The same tokens in the same step, whatever the layout."""

import hashlib
import math
import random
import re
from collections import Counter

import pytest
import torch

from lib import data, text

TEXT = torch.arange(1000).remainder(251).to(torch.uint8)


@pytest.fixture(scope="module")
def corpus() -> data.Corpus:
    return data.load()


def test_the_text_is_the_same_for_ever(corpus):
    """Pages claim losses on it: with a different text, all of them must be measured again."""
    digest = "563e07826854fa07eb0745117bfb7ab8033e2db42f59035bc291109bd0fed6b9"
    assert hashlib.sha256(text.TEXT).hexdigest() == digest
    assert bytes(corpus.train.tolist()) + bytes(corpus.validation.tolist()) == text.TEXT


def test_its_stories_are_whole_and_right():
    """Nothing of the grammar is left, quotes and brackets close, sums are right, and the names of a story return."""
    whole = text.TEXT.decode("ascii")
    assert not re.search(r"[<>|\\]|\b[Aa] [aeiou]", whole)
    stories = whole.split("\n\n# ")
    assert len(stories) == len(set(stories)) == text.CHAPTERS * text.STORIES
    for story in stories:
        assert story.count('"') % 2 == 0 and story.count("(") == story.count(")")
        for a, b, total in re.findall(r"(\d+) \+ (\d+) =+ (\d+)", story):
            assert int(a) + int(b) == int(total)
    names = [Counter(re.findall(r"\b(?:Ada|Grace|Barbara|Frances)\b", story)) for story in stories]
    assert {len(of_story) for of_story in names} == {0, 1}


def test_a_few_words_are_frequent_and_most_are_rare():
    counts = [n for _, n in Counter(re.findall(r"\w+", text.TEXT.decode())).most_common()]
    assert sum(counts[:10]) > 0.25 * sum(counts) and len(counts) > 500
    assert counts[0] > 10 * counts[20] > 50 * counts[300]


def test_no_two_parts_are_alike():
    """The favourite words of each sixteenth of the text, and so the data of each rank."""
    parts = [text.TEXT[i * len(text.TEXT) // 16 : (i + 1) * len(text.TEXT) // 16] for i in range(16)]
    counts = [Counter(re.findall(rb"\w{4,}", part)) for part in parts]
    favourites = {tuple(sorted(word for word, _ in words.most_common(10))) for words in counts}
    assert len(favourites) == 16


def test_a_different_seed_writes_a_different_text():
    other = text.stories("another")
    assert other != text.TEXT and 0.9 < len(other) / len(text.TEXT) < 1.1
    assert text.stories("another") == other


def test_the_last_tenth_is_kept_for_validation(corpus):
    whole = len(corpus.train) + len(corpus.validation)
    assert len(corpus.validation) == whole // 10
    assert corpus.train.dtype == corpus.validation.dtype == torch.uint8
    own = data.load(b"abcdefghij" * 3, validation_fraction=0.2)
    assert (data.decode(own.train), data.decode(own.validation)) == ("abcdefghij" * 2 + "abcd", "efghij")


def test_encode_and_decode():
    assert data.encode("aß").tolist() == [97, 0xC3, 0x9F]
    assert data.decode(data.encode("naïve – text")) == "naïve – text"
    assert data.decode(torch.tensor([0xC3])) == "�"
    assert data.encode(b"").tolist() == []


def test_targets_are_the_inputs_one_token_later(corpus):
    inputs, targets = data.batch(corpus.train, 5, global_batch=6, context=32)
    assert inputs.shape == targets.shape == (6, 32)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    text = bytes(corpus.train.tolist())
    for row, target in zip(inputs.tolist(), targets.tolist(), strict=True):
        assert bytes([*row, target[-1]]) in text


def test_a_batch_depends_on_seed_and_step_and_nothing_else():
    make = lambda step, seed, rows=8: data.batch(TEXT, step, global_batch=rows, context=16, seed=seed)[0]  # noqa: E731
    first = make(3, 0)
    torch.manual_seed(123)
    state = torch.get_rng_state()
    random.seed(123)
    number = random.random()
    random.seed(123)
    assert torch.equal(make(3, 0), first)
    assert torch.equal(torch.get_rng_state(), state) and random.random() == number  # touches no global generator
    assert not torch.equal(make(4, 0), first)
    assert not torch.equal(make(3, 1), first)
    assert not torch.equal(make(0, 11), make(11, 0))
    assert torch.equal(make(3, 0, rows=3), first[:3])  # a larger batch begins with the smaller one


def test_the_same_batch_on_every_machine():
    first_tokens = data.batch(TEXT, 7, global_batch=4, context=4, seed=5)[0][:, 0].tolist()
    assert first_tokens == [10, 169, 151, 102]


def test_batches_reach_the_whole_text():
    starts = {int(row[0]) for step in range(60) for row in data.batch(TEXT[:20], step, global_batch=8, context=4)[0]}
    assert starts == set(range(16))  # the last sequence uses the last token as target


def test_windows_cover_the_text_once_in_order():
    inputs, targets = data.windows(TEXT[:21], 5)
    assert torch.equal(inputs.flatten(), TEXT[:20].long()) and torch.equal(targets.flatten(), TEXT[1:21].long())
    assert data.windows(TEXT[:20], 5)[0].shape == (3, 5)  # the last target would be missing
    spread, _ = data.windows(TEXT, 10, limit=3)
    assert spread[:, 0].tolist() == [0, 330 % 251, 660 % 251]
    assert torch.equal(data.windows(TEXT, 10, limit=10_000)[0], data.windows(TEXT, 10)[0])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_ranks_together_have_every_row_once(size):
    rows = torch.arange(12)
    parts = [rows[data.rows_of_rank(12, rank, size)] for rank in range(size)]
    assert torch.equal(torch.cat(parts), rows)
    assert {len(part) for part in parts} == {12 // size}


def test_uneven_shares():
    rows = torch.arange(7)
    parts = [rows[data.rows_of_rank(7, rank, 4, shares=[3, 0, 2, 2])].tolist() for rank in range(4)]
    assert parts == [[0, 1, 2], [], [3, 4], [5, 6]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (4, 0, 3),
            r"global_batch=4 cannot be split over dp=3; use a multiple of 3, such as 6, or .* shares=\[2, 1, 1\]",
        ),
        ((2, 0, 4), r"global_batch=2 cannot be split over dp=4; use a multiple of 4, such as 4, .*\[1, 1, 0, 0\]"),
        ((0, 0, 2), r"global_batch=0 cannot be split over dp=2; use a multiple of 2, such as 2"),
        ((4, 2, 2), r"rank=2 is not one of the dp=2 ranks"),
        ((4, -1, 2), r"rank=-1 is not one of the dp=2 ranks"),
        ((4, 0, 0), r"rank=0 is not one of the dp=0 ranks"),
        ((4, 0, 2, [3, 2]), r"shares=\[3, 2\] must be dp=2 numbers.*global_batch=4"),
        ((4, 0, 2, [4]), r"shares=\[4\] must be dp=2 numbers"),
        ((4, 0, 2, [5, -1]), r"none negative"),
    ],
)
def test_a_split_that_cannot_be_says_so(arguments, message):
    with pytest.raises(ValueError, match=message):
        data.rows_of_rank(*arguments)


def test_wrong_sizes_say_so():
    with pytest.raises(ValueError, match="global_batch=0 and context=4 must be 1 or more"):
        data.batch(TEXT, 0, global_batch=0, context=4)
    with pytest.raises(ValueError, match="20 tokens is too short for context=20"):
        data.batch(TEXT[:20], 0, global_batch=1, context=20)
    with pytest.raises(ValueError, match="20 tokens is too short for context=20"):
        data.windows(TEXT[:20], 20)
    with pytest.raises(ValueError, match="limit=0"):
        data.windows(TEXT, 5, limit=0)
    with pytest.raises(ValueError, match="validation_fraction=1"):
        data.load(b"abc" * 10, validation_fraction=1)
    with pytest.raises(ValueError, match="5 bytes is too short"):
        data.load(b"abcde")


def test_unigram_entropy():
    assert data.unigram_entropy(data.encode("aaaa")) == 0
    assert data.unigram_entropy(data.encode("abcdabcd")) == pytest.approx(math.log(4), rel=1e-15)
    assert data.unigram_entropy(data.encode("aab")) == pytest.approx(
        2 / 3 * math.log(1.5) + math.log(3) / 3, rel=1e-15
    )
    with pytest.raises(ValueError, match="empty text"):
        data.unigram_entropy(data.encode(""))


def test_no_unigram_model_beats_the_entropy_and_a_bigram_table_does(corpus):
    tokens = corpus.validation.tolist()
    entropy = data.unigram_entropy(corpus.validation)
    assert 2.5 < entropy < 4.0
    train = Counter(corpus.train.tolist())
    cross = -sum(math.log((train[t] + 1) / (len(corpus.train) + 256)) for t in tokens) / len(tokens)
    assert cross > entropy
    pairs = Counter(zip(tokens, tokens[1:], strict=False))
    first = Counter(tokens[:-1])
    assert -sum(n * math.log(n / first[a]) for (a, _), n in pairs.items()) / (len(tokens) - 1) < entropy - 0.5
