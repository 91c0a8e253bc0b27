"""16.6: a layout for two nodes with eight network cards each and one with a single card; what crosses, in numbers."""

from course.check.compare import SEEN
from course.check.edits import exercise
from course.check.exercise import known_number, several
from course.check.two_nodes import judged, two_nodes
from lib.planner import Choices, Layout4D, best_layouts

PARTS = CARDS, CARD, GRADIENTS, MESSAGES = (
    "the layout for eight cards",
    "the layout for one card",
    "seconds of gradients and parameters",
    "seconds of activations",
)


def inputs(generator, n):
    """The numbers of the right program and of each wrong one."""
    wrong = (m.wrong.load()() for m in EXERCISE.mistakes if m.about[0] in PARTS[2:])
    return [{"known": [*zip(over_the_network(), *wrong, strict=True)][2:]}]


def body(answer, group, given):
    found = {}
    *layouts, gradients, messages = several(answer(), len(PARTS))
    for part, training, layout in zip(PARTS[:2], two_nodes(), layouts, strict=True):
        found[part], figures = judged(training, layout)
        if figures:
            found[f"{part}: {SEEN}"] = figures
    return found | {part: known_number(x, ()) for part, x in zip(PARTS[2:], (gradients, messages), strict=True)}


def compared(found, given):
    numbers = zip(PARTS[2:], given["known"], strict=True)
    return found | {part: known_number(found[part], known) for part, known in numbers}


def over_the_network():
    cards = Layout4D(2, 1, 1, 8, rows=2, sequence_parallel=True)
    card = Layout4D(2, 1, 2, 4, stages_per_rank=4, sequence_parallel=True)
    gradients = 13.0e9 * (4 + 2) * (2 - 1) / 2 / 50e9
    messages = 32 * 4096 * 5120 * 2 / 50e9
    return cards, card, gradients, messages


def by_search():
    """The planner's best of both; numbers per GPU, of which eight share a card."""
    best = (best_layouts(training, Choices())[0].layout for training in two_nodes())
    per_gpu_Bps = 50e9 / 8
    return [*best, 13.0e9 / 8 * 6 * 0.5 / per_gpu_Bps, 4 * 4096 * 5120 * 2 / per_gpu_Bps]


def one_at_a_time():
    """Microbatches of one sequence; a plain tuple, and rounded."""
    card = Layout4D(2, 1, 2, 4, stages_per_rank=5, sequence_parallel=True)
    return Layout4D(2, 1, 1, 8, sequence_parallel=True), tuple(card), 0.78, 0.027


ALSO_RIGHT = """
Layout4D(2, 1, 1, 8, rows=2, sequence_parallel=True) => Layout4D(2, 1, 1, 8, sequence_parallel=True)
Layout4D(2, 1, 2, 4, stages_per_rank=4, sequence_parallel=True) => Layout4D(1, 1, 2, 8, stages_per_rank=4)
    The second is nearly 3% slower than the best.
"""

# Of either layout, whatever the network is.
REFUSED = """
=> Layout4D(1, 1, 16, 1)
    {cards}: the layers cannot be shared out evenly among the stages.
        40 layers, or 42 with embedding and head, divided by pp · stages_per_rank.
=> Layout4D(2, 1, 1, 8, rows=3, sequence_parallel=True)
    {cards}: the sequences cannot be shared out evenly.
        32 sequences, divided by dp · rows.
=> Layout4D(2, 1, 1, 8, stages_per_rank=2, sequence_parallel=True)
    {cards}: several stages per rank need a pipeline, and a multiple of pp microbatches.
        32 / (dp · rows) microbatches, divided by pp.
=> Layout4D(2, 1, 1, 8, zero=3, sequence_parallel=True)
    {cards}: your layout has ZeRO-3 next to tp or a pipeline, and the planner refuses that.
        ZeRO-3 gathers whole parameters: here it goes with dp alone.
"""

MISTAKES = """
returns result[:2]
    Return four things: two layouts, and two numbers.

in the layout for eight cards:
returns ({}, *result[1:])
    Your layout for eight cards is no layout.
        Return a Layout4D, such as Layout4D(tp=2, cp=1, pp=1, dp=8).
Layout4D(2, 1, 1, 8, rows=2, sequence_parallel=True) => Layout4D(4, 1, 1, 8)
    Eight cards: the degrees do not multiply to 16 GPUs.
        tp · pp · dp = 16.
"""
MISTAKES += REFUSED.format(cards="Eight cards")
MISTAKES += """
=> Layout4D(16, 1, 1, 1, sequence_parallel=True)
    Eight cards: tp reaches over both nodes. It sums activations several times in each layer, and everybody waits.
        Keep tp inside a node.
=> Layout4D(1, 1, 1, 16)
    Eight cards: the model states alone are too large.
        ZeRO-1 leaves 6 bytes per parameter on each GPU: cut the parameters too, by tp, pp or ZeRO-3.
=> Layout4D(1, 1, 2, 8, stages_per_rank=2)
    Eight cards: states fit, activations do not.
        Smaller stages, a smaller microbatch or sequence parallelism keep less.
=> Layout4D(2, 1, 2, 4, stages_per_rank=7, sequence_parallel=True)
    Eight cards: your matmuls take longer: tp cuts them into thin ones, you recompute, or one stage has more work.
        Nothing forces you here: choose the smallest tp with which the model fits.
=> Layout4D(4, 1, 1, 4, rows=4, sequence_parallel=True)
or
=> Layout4D(8, 1, 1, 2, sequence_parallel=True)
    Eight cards: the sums of tp take longer.
        Fewer ranks of tp sum less. Choose the smallest tp with which the model fits.
=> Layout4D(2, 1, 2, 4, stages_per_rank=10, zero=0, sequence_parallel=True)
    Eight cards: the optimizer takes longer, because without ZeRO-1 each replica steps with all parameters of its stage.
        ZeRO-1 divides this work over dp, and sends no more.
=> Layout4D(1, 1, 2, 8, stages_per_rank=5)
or Layout4D(2, 1, 1, 8, rows=2, sequence_parallel=True) => Layout4D(1, 1, 2, 8)
    Eight cards: it fits, and the bubble is too long.
        Several stages per rank shorten it. Without stages there is none.
Layout4D(2, 1, 1, 8, rows=2, sequence_parallel=True) => Layout4D(1, 1, 1, 16, zero=3)
    Eight cards: you send the parameters of every microbatch.
        ZeRO-3 gathers them anew for each. Fewer and larger microbatches help, or ZeRO-1 with tp.

in the layout for one card:
returns (result[0], {}, *result[2:])
    Your layout for one card is no layout.
        Return a Layout4D, such as Layout4D(tp=2, cp=1, pp=1, dp=8).
Layout4D(2, 1, 2, 4, stages_per_rank=4, sequence_parallel=True) => Layout4D(4, 1, 1, 8)
    One card: the degrees do not multiply to 16 GPUs.
        tp · pp · dp = 16.
"""
MISTAKES += REFUSED.format(cards="One card")
MISTAKES += """
=> Layout4D(16, 1, 1, 1, sequence_parallel=True)
    One card: tp reaches over both nodes, and all its sums go through one card.
        Keep tp inside a node.
=> Layout4D(1, 1, 1, 16)
    One card: the model states alone are too large.
        ZeRO-1 leaves 6 bytes per parameter on each GPU: cut the parameters too.
=> Layout4D(1, 1, 2, 8, stages_per_rank=2)
    One card: states fit, activations do not.
        Smaller stages, a smaller microbatch or sequence parallelism keep less.
=> Layout4D(2, 1, 1, 8, rows=2, sequence_parallel=True)
    One card: all gradients of a node go through it, in each step.
        Let dp stay inside the node, and put the pipeline's boundary between the nodes.
=> Layout4D(1, 1, 2, 8)
    One card: the right axis crosses, and the bubble is too long.
        Several stages per rank shorten it. They send more, and that is still little.
=> Layout4D(8, 1, 2, 1, sequence_parallel=True)
    One card: the sums of tp take longer.
        Fewer ranks of tp sum less. Choose the smallest tp with which the model fits.
=> Layout4D(2, 1, 2, 4, stages_per_rank=7, sequence_parallel=True)
    One card: your matmuls take longer: tp cuts them into thin ones, you recompute, or one stage has more work.
        With a pipeline between the nodes dp is free to be large inside, and stages of equal work are best.
=> Layout4D(1, 1, 4, 4, stages_per_rank=10)
    One card: the messages between stages take longer.
        Each further stage of a rank sends as much again through the card: fewer stages per rank send less.
=> Layout4D(2, 1, 2, 4, stages_per_rank=3, zero=0, sequence_parallel=True)
    One card: the optimizer takes longer, because without ZeRO-1 each replica steps with all parameters of its stage.
        ZeRO-1 divides this work over dp.

in seconds of gradients and parameters:
returns (*result[:2], 1000 * result[2], result[3])
    Gradients: that is in milliseconds.
        Return seconds.
* (2 - 1) / 2 / 50e9 => * (2 - 1) / 2 / 8 / 50e9
    Gradients: that is what one GPU would send through a card of its own.
        Eight GPUs share the card, and each has an eighth of the parameters.
=> * (2 - 1) / 2 * 8 / 50e9
    Gradients: you let each GPU send the gradients of all parameters.
        tp = 8 leaves each GPU an eighth of them.
=> * (2 - 1) / 2 / 450e9
    Gradients: that is the link inside a node.
        The two ranks of a dp group are in two nodes.
=> / 50e9
    Gradients: you send the full array each way.
        A ring of two sends (d-1)/d of it, one half: a rank keeps the chunk that it reduces.
* (4 + 2) => * 4
    Gradients: you send 4 bytes per parameter.
        A gradient is summed in float32, 4 bytes; then the updated parameter is gathered, 2 bytes more.
=> * (4 + 4)
    Gradients: you count an all-reduce in float32.
        A reduce-scatter of gradients, 4 bytes each, then an all-gather of parameters, 2 bytes each.

in seconds of activations:
returns (*result[:3], 1000 * result[3])
    Activations: that is in milliseconds.
        Return seconds.
32 * 4096 * 5120 * 2 => 4 * 4096 * 5120 * 2
    Activations: those are the sequences of one replica.
        Eight replicas are in the first node, and they share its card.
=> 32 * 5120 * 2
    Activations: that is one token of each sequence.
        A sequence has 4096 tokens, and each of them crosses.
=> 4096 * 5120 * 2
    Activations: that is one sequence.
        In a step 32 of them cross.
=> 2 * 32 * 4096 * 5120 * 2
    Activations: you add the gradients that come back.
        They go the other way, for which the card has the same speed again.
=> 40 * 32 * 4096 * 5120 * 2
    Activations: you send them after each layer.
        They cross only between the two stages.
=> 32 * 4096 * 5120
    Activations: you count elements.
        They are sent in 16 bits: 2 bytes each.
32 * 4096 * 5120 * 2 / 50e9 => 32 * 4096 * 5120 * 2 / 450e9
    Activations: that is the link inside a node.
        The stages are in two nodes.
"""

EXERCISE = exercise(
    globals(),
    points=4,
    right=(over_the_network, by_search, one_at_a_time),
    ranks=(1,),
    parts=PARTS,
    timeout_s=10,
    withheld=("known",),
)
