"""14.2: the memory of the rank with the highest peak in three layouts, in gigabytes."""

import inspect
from dataclasses import replace
from functools import partial

from course.check.edits import Edited, exercise
from course.check.exercise import kind, known_number, several, with_variants, word
from lib.cost.sizes import ModelShape
from lib.planner import Cluster, Layout4D, Training, memory_bytes
from lib.planner.training import GPUS, stack_for

LAYOUTS = {  # with the sequences of a step
    "A": (Layout4D(8, 1, 8, 2, 1, 1, 0, True), 8),
    "B": (Layout4D(8, 1, 4, 4, 1, 4, 1, True), 128),
    "C": (Layout4D(4, 1, 4, 4, 2, 1, 1, True, "full"), 256),
}
WHATS = ("the rank", "model states", "activations", "logits")


def body(answer, group, given):
    result = answer()
    found = {"what was returned": kind(result)}
    for name, row in zip(LAYOUTS, several(result, len(LAYOUTS)), strict=True):
        end, *numbers = several(row, len(WHATS))
        numbers = [known_number(x, ()) for x in numbers]
        found |= dict(zip(entries(name), (word(end), *numbers), strict=True))
    return found


def entries(name):
    return [f"layout {name}: {what}" for what in WHATS]


def compared(found, given):
    """A rounded number is taken for the right number, or the number of a mistake, that it is near."""
    for name, rows in zip(LAYOUTS, given["known"], strict=True):
        _, *numbers = zip(entries(name), *rows, strict=True)
        found |= {entry: known_number(found[entry], known) for entry, *known in numbers}
    return found


def fullest_ranks():
    h, s, vocabulary = 8192, 4096, 131_072
    block, end = 12 * h**2 / 1e9, vocabulary * h / 1e9
    x = s * h / 1e9  # GB of a byte for each element

    states_a = 18 * (8 * block + end) / 8
    states_b = (6 + 12 / 4) * (16 * block + end) / 8
    states_c = (6 + 12 / 4) * (16 * block + end) / 4
    acts_a = 4 * 8 * 34 * x / 8
    acts_b = 4 * (1 + 3 / 16) * 16 * 34 * x / 8
    acts_c = (16 * 2 + 34) * 2 * x / 4
    logits_c = 14 * 2 * s * vocabulary / 4 / 1e9
    return (
        ("first", states_a, acts_a, 0),
        ("first", states_b, acts_b, 0),
        ("last", states_c, acts_c, logits_c),
    )


def by_the_planner(h=8192, s=4096, vocabulary=131_072):
    """Only a last rank has logits."""
    rows, model, stack = [], ModelShape(h, 64, 64, vocabulary, s, tied=False), stack_for("megatron-lm", "h100")
    for layout, sequences in LAYOUTS.values():
        found = memory_bytes(Training(model, Cluster(GPUS["h100"], layout.gpus), stack, sequences), layout)
        states = found.parameters + found.gradients + found.optimizer
        end = "last" if found.logits else "first"
        rows.append([end, states / 1e9, found.activations / 1e9, found.logits / 1e9])
    return rows


def rounded(answer):
    return tuple((end.capitalize(), *(float(f"{x:.3g}") for x in numbers)) for end, *numbers in answer())


MISTAKES = """
returns [(end, *(x * 1e9 / 2**30 for x in numbers)) for end, *numbers in result]
    Your numbers are in GiB, of 2³⁰ bytes.
        A GB has 10⁹ bytes.
returns [(end, *(1e9 * x for x in numbers)) for end, *numbers in result]
    Your numbers are in bytes.
        A GB has 10⁹ bytes.
"first", states_a => "last", states_a
or
"first", states_b => "last", states_b
    the last rank has logits, less than 1 GB, and that does not make it the fullest.
        Compare them with the activations in flight on the first rank.
"last", states_c => "first", states_c
    the first rank keeps four times the microbatches of the last rank. With full recomputation that is 1.6 GB more.
        Compare it with the logits, which only the last rank has.
states_a = 18 => states_a = 16
or
states_b = (6 + 12 / 4) => states_b = (4 + 12 / 4)
or
states_c = (6 + 12 / 4) => states_c = (4 + 12 / 4)
    your gradients have 2 bytes per parameter.
        This stack sums them in float32: 4 bytes, so 18 in all.
(8 * block + end) => 8 * block
or
(16 * block + end) / 8 => 16 * block / 8
or
(16 * block + end) / 4 => 16 * block / 4
    the first rank also holds the embedding, the last rank the head.
        V·h parameters, divided by t.
(8 * block + end) / 8 => (8 * block / 8 + end)
or
(16 * block + end) / 8 => (16 * block / 8 + end)
or
(16 * block + end) / 4 => (16 * block / 4 + end)
    you do not divide the embedding, or the head, by t.
        Tp cuts both over the vocabulary: each of its ranks has V·h/t parameters.
(8 * block + end) => (8 * block + 2 * end)
or
(16 * block + end) / 8 => (16 * block + 2 * end) / 8
or
(16 * block + end) / 4 => (16 * block + 2 * end) / 4
    you count embedding and head on the same rank.
        With a pipeline the first rank has the embedding, and the last rank has the head.
(8 * block + end) / 8 => (8 * block + end)
or
(16 * block + end) / 8 => (16 * block + end)
or
(16 * block + end) / 4 => (16 * block + end)
    tp does not divide your model states.
        Each of its ranks has 1/t of every matrix.
(8 * block + end) => (64 * block + end)
or
(16 * block + end) / 8 => (64 * block + end) / 8
or
(16 * block + end) / 4 => (64 * block + end) / 4
    your model states are those of all 64 blocks.
        A rank of the pipeline has 64/p of them.
(16 * block + end) / 8 => (4 * block + end) / 8
    your model states are those of one stage.
        With v stages per rank a rank has v of them: 64/p blocks.
states_a = 18 => states_a = 18 / 2
    without ZeRO every replica keeps all model states of its stage.
        Dp divides nothing there.
states_b = (6 + 12 / 4) => states_b = (6 + 12) / 4
or
states_c = (6 + 12 / 4) => states_c = (6 + 12) / 4
    ZeRO-1 divides the optimizer state over dp, 12 of 18 bytes.
        Parameters and gradients stay full on each replica.
states_b = (6 + 12 / 4) => states_b = (6 + 12)
or
states_c = (6 + 12 / 4) => states_c = (6 + 12)
    you left ZeRO-1 out.
        It divides the 12 bytes of optimizer state over dp.
acts_a = 4 * 8 => acts_a = 8 * 8
    you count p = 8 microbatches in flight.
        A step has only 4: the first rank keeps min(m, p).
4 * (1 + 3 / 16) => 4
    p microbatches in flight is right with one stage per rank.
        With v the first rank keeps 1 + (p-1)/(p·v) times that.
=> 32
    you keep all 32 microbatches, as GPipe does.
        Under interleaved 1F1B the first rank keeps p·(1 + (p-1)/(p·v)).
states_a, acts_a => states_a, acts_a / 8
    your activations are divided by t twice, or they are those of a single block.
        The task gives the bytes of a block on one rank, and a rank has 64/p blocks.
states_b, acts_b => states_b, acts_b / 8
or
states_c, acts_c => states_c, acts_c / 4
    activations are divided by t twice.
        The task gives the bytes of a block on one rank.
acts_a = 4 * 8 => acts_a = 8
    these are the activations of one microbatch.
        The first rank keeps min(m, p) of them.
4 * (1 + 3 / 16) => 1
    these are one microbatch's activations.
        Interleaved 1F1B keeps p·(1 + (p-1)/(p·v)) of them on the first rank.
acts_a = 4 * 8 * 34 * x / 8 => acts_a = 4 * 8 * 34 * x
    your activations are not divided by t, or they are those of all 64 blocks.
        With sequence parallelism each of the t ranks keeps 1/t of them, and a rank of the pipeline has 64/p blocks.
4 * (1 + 3 / 16) * 16 => 4 * (1 + 3 / 16) * 64
    your activations are those of all 64 blocks.
        A rank of the pipeline has 64/p of them.
4 * (1 + 3 / 16) * 16 * 34 * x / 8 => 4 * (1 + 3 / 16) * 16 * 34 * x
or
(16 * 2 + 34) * 2 * x / 4 => (16 * 2 + 34) * 2 * x
    your activations are not divided by t.
        With sequence parallelism each of the t ranks keeps 1/t of them.
4 * (1 + 3 / 16) * 16 => 4 * (1 + 3 / 16) * 4
    you keep the activations of one stage.
        A rank has v = 4 stages, 16 blocks in all.
(16 * 2 + 34) * 2 * x => (16 * 2 + 34) * x
    these are the activations of one sequence.
        A microbatch of this layout has b = 2 sequences.
(16 * 2 + 34) => 16 * 34
    you keep the insides of all blocks.
        With full recomputation a rank keeps their inputs, and the insides of one.
=> 16 * 2
    full recomputation keeps the inputs of all blocks.
        While a block runs backward, its inside is kept as well.
=> 34
    these are the insides of one block alone.
        The inputs of all blocks of the rank are kept as well, until backward begins there.
=> (4 * 16 * 2 + 34)
    you keep the inputs of 64 blocks: of four microbatches, as the first rank does, or of all four ranks.
        The last rank has one microbatch in flight, and 64/p blocks.
vocabulary / 4 => vocabulary
    your logits are four times as many: of the full vocabulary, or of four microbatches.
        The vocabulary is cut over tp, and logits are kept for one microbatch at a time.
14 * 2 * s => 14 * s
    these are the logits of one sequence.
        A microbatch of this layout has b = 2 sequences.
acts_c, logits_c => acts_c, 0
    the rank with the highest peak has logits here.
        Compare what the first rank keeps more of with 14 bytes for each logit of a microbatch.
14 * 2 * s => 2 * 2 * s
    the head computes 2 bytes per logit.
        The loss makes it 14 at its peak.
acts_a, 0 => acts_a, 14 * s * vocabulary / 8 / 1e9
or
acts_b, 0 => acts_b, 14 * s * vocabulary / 8 / 1e9
    the first rank has the highest peak, and it has no logits.
        They are on the last rank.
"""


BOOK, MORE_GB = "8192, 4096, 131_072", "1.6 GB"  # the sizes in the program; a number in a hint


def row(h=8192, s=4096, vocabulary=131_072):
    """The exercise for a model of this width, sequence and vocabulary."""
    made = exercise(
        globals(), points=3, right=(fullest_ranks, by_the_planner), ranks=(1,), inputs=list, withheld=("known",)
    )
    sizes, more_GB = f"{h}, {s}, {vocabulary}", f"{3 * 16 * 2 * 2 * s * h / 4 / 1e9:.1f} GB"
    program = Edited(__name__, inspect.getsource(fullest_ranks).replace(BOOK, sizes), fullest_ranks.__name__).load()
    right = program()

    def of_its_entries(mistake):
        """The entries that an edit changes must agree, and no others; the hint names the entry, if it is one."""
        wrong = replace(mistake.wrong, text=mistake.wrong.text.replace(BOOK, sizes))
        tables = zip(LAYOUTS, right, wrong.load()(), strict=True)
        changed = [entry for name, *rows in tables for entry, x, y in zip(entries(name), *rows) if x != y]
        of = f"L{changed[0][1:].partition(':')[0]}: " if len(changed) == 1 else ""
        return replace(mistake, wrong=wrong, hint=of + mistake.hint.replace(MORE_GB, more_GB), about=tuple(changed))

    mistakes = tuple(map(of_its_entries, made.mistakes))
    # The numbers of the right program and of each wrong one, in order of their places.
    known = [*zip(right, *(m.wrong.load()() for m in mistakes), strict=True)]
    return replace(
        made,
        right=(
            fullest_ranks if sizes == BOOK.replace("_", "") else program,
            partial(by_the_planner, h, s, vocabulary),
            partial(rounded, program),
        ),
        mistakes=mistakes,
        inputs=lambda generator, n: [{"known": known}],
        task=f"The model has h = {h}, sequences of s = {s} tokens, and a vocabulary of V = {vocabulary:,}.",
    )


EXERCISE = with_variants(replace(row(), task=""), row(7168, 8192, 65_536), row(6144, 2048, 262_144))
