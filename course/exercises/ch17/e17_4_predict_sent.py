"""17.4: the bytes that a rank sends in attention, forward and backward, as a run counts them.

The judge has a formula. At each check a run of the library must agree with it, or nothing passes.
"""

import torch

from course.check.compare import SEEN
from course.check.edits import exercise
from course.check.exercise import kind, several, whole
from course.check.listen import listen
from lib.context_parallel.attention import gather_attention, ulysses_attention
from lib.context_parallel.ring import ring_attention

WAYS = {"gather": gather_attention, "ring": ring_attention, "ulysses": ulysses_attention}
HEADS = ((24, 12), (12, 3), (12, 1))  # H and K: K above, near and below the number of ranks
WHATS = ("forward", "backward")


def inputs(generator, n):
    """New sizes at each call, equal on all ranks."""
    cases = []
    for heads, kv_heads in HEADS:
        if kv_heads % n and n % kv_heads:
            kv_heads = n // 2
        rows, tokens, width = whole(generator, 2, 5), n * whole(generator, 5, 8), 2 * whole(generator, 4, 8)
        cases.append((rows, tokens, heads, kv_heads, width))
    return [{"cases": cases}] * n


def body(answer, group, given):
    found, lines = {}, [f"A run on {group.size} ranks counted, forward and backward:"]
    for case in given["cases"]:
        for way in WAYS:
            title = named(way, group.size, case)
            result = answer(way, group.size, *case)
            found[f"{title}: what was returned"] = kind(result)
            found |= {f"{title}: {what}": x for what, x in zip(WHATS, several(result, 2), strict=True)}
            counted = [f"{n_bytes:,.0f}" for n_bytes in counted_bytes(way, group, *case)]
            found |= {f"{title}: counted {what}": x for what, x in zip(WHATS, counted, strict=True)}
            lines.append(f"  {title}: {' and '.join(counted)}")
    return found | {SEEN: "\n".join(lines)}


def named(way, n, case):
    sizes = zip(("n", "rows", "T", "H", "K", "E"), (n, *case), strict=True)
    return f"{way}, {', '.join(f'{letter} = {size}' for letter, size in sizes)}"


def counted_bytes(way, group, rows, tokens, heads, kv_heads, width):
    """The messages of a run in float32."""
    t = tokens // group.size
    leaves = [torch.randn(rows, h, t, width, requires_grad=True) for h in (heads, kv_heads, kv_heads)]
    heard = listen()
    y = WAYS[way](*leaves, group)
    forward = heard.sent_bytes(group.size)
    heard.forget()
    y.backward(torch.ones_like(y))
    return forward, heard.sent_bytes(group.size)


def reference(given):
    n, found = len(given), {}
    for case in given[0]["cases"]:
        for way in WAYS:
            title = named(way, n, case)
            both = right_bytes(way, n, *case)
            found |= {f"{title}: what was returned": "2 results"}
            found |= {f"{title}: {what}": float(x) for what, x in zip(WHATS, both, strict=True)}
            found |= {f"{title}: counted {what}": f"{x:,.0f}" for what, x in zip(WHATS, both, strict=True)}
    return [found] * n


def right_bytes(way, n, rows, tokens, heads, kv_heads, width):
    """In messages: each of n - 1 neighbours gets a tensor of so many heads and tokens."""
    t, head_token = tokens // n, 4 * rows * width
    of_kv = 2 * kv_heads * t * head_token
    if way == "ulysses":
        each = 2 * (heads + max(kv_heads, n)) // n * t * head_token
        return (n - 1) * each, (n - 1) * each
    return (n - 1) * of_kv, (n - 1) * of_kv * (2 if way == "ring" else 1)


def predict_sent(way, n, rows, tokens, heads, kv_heads, width):
    a_head = 4 * rows * (tokens / n) * width
    gathered = 2 * kv_heads * a_head * (n - 1)
    if way == "gather":
        return gathered, gathered
    if way == "ring":
        return gathered, 2 * gathered
    copied = max(kv_heads, n)
    exchanged = 2 * (heads + copied) * a_head * (n - 1) / n
    return exchanged, exchanged


def in_units(way, n, rows, tokens, heads, kv_heads, width):
    """By the table of the chapter: g and x, whole numbers at the end, in a list."""
    x = 4 * rows * tokens * heads * width
    g = kv_heads / heads if way != "ulysses" or kv_heads >= n else n / heads
    forward, backward = {
        "gather": (2 * g * (n - 1) / n, 2 * g * (n - 1) / n),
        "ring": (2 * g * (n - 1) / n, 4 * g * (n - 1) / n),
        "ulysses": [2 * (1 + g) * (n - 1) / n**2] * 2,
    }[way]
    return [round(forward * x), round(backward * x)]


MISTAKES = """
return gathered, 2 * gathered => return gathered, gathered
    Your ring's backward sends as much as its forward. The keys and values go around again, because they were not
    kept, and with each block travels its gradient.
        Count both: twice as much as forward.
return gathered, 2 * gathered => return gathered, 3 * gathered
    Your backward of the ring has three rounds. Both directions together have three.
        Return forward and backward apart: one round, then two.
return gathered, 2 * gathered => return gathered * n / (n - 1), 2 * gathered * n / (n - 1)
    Your ring makes n hops in a round. A rank has its own keys and values already.
        n - 1 blocks arrive, and n - 1 are sent on.
return gathered, 2 * gathered => return gathered / n, 2 * gathered / n
    For the ring you count n times too little: a rank sends a full block in each hop, and not a fraction of it.
        The factor (n - 1)/n belongs to the keys and values of the full sequence.
return gathered, 2 * gathered => return 2 * gathered, gathered
    Your two numbers for the ring are in the reverse order.
        Return forward first.
copied = max(kv_heads, n) => copied = kv_heads
    With fewer heads of keys than ranks, Ulysses cannot give each rank one. You count K of them.
        They are copied until there are n, and the copies are sent as well: max(K, n).
copied = max(kv_heads, n) => copied = heads if kv_heads < n else kv_heads
    With fewer heads of keys than ranks you copy them for every query head.
        Each rank needs one head: n are enough.
copied = max(kv_heads, n) => copied = heads
    For Ulysses you count as many heads of keys as of queries.
        Grouped heads are exchanged as they are, and copied only if there are fewer than ranks: max(K, n).
exchanged = 2 * (heads + copied) * a_head * (n - 1) / n => exchanged = 2 * (heads + copied) * a_head * (n - 1)
    Your all-to-all sends n times too much: all heads to each neighbour.
        Each of the n - 1 neighbours gets 1/n of the heads of this rank's tokens.
exchanged = 2 * (heads + copied) * a_head * (n - 1) / n => exchanged = 2 * (heads + copied) * a_head
    Your all-to-all sends everything away. One part in n stays: a rank keeps its own heads of its own tokens.
        Multiply by (n - 1)/n.
exchanged = 2 * (heads + copied) * a_head * (n - 1) / n => exchanged = (heads + 2 * copied) * a_head * (n - 1) / n
    Ulysses has four exchanges in forward, and you count three: queries, keys and values.
        The output returns to its tokens: H heads.
exchanged = 2 * (heads + copied) * a_head * (n - 1) / n => exchanged = (2 * heads + copied) * a_head * (n - 1) / n
    For Ulysses you count keys or values.
        Both are exchanged: queries, keys, values, output.
in ulysses: return exchanged, exchanged => return exchanged, 0
    You have no backward for Ulysses. The gradients of the output, queries, keys and values are
    exchanged.
        Each exchange has one in backward, the reverse.
"""

EXERCISE = exercise(globals(), points=1, right=(predict_sent, in_units))
