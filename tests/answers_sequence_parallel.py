"""Answers to the exercises of chapter 07: right ones, and one for each mistake that has a name."""

import os

import torch
import torch.distributed as dist
from torch.nn.functional import gelu, layer_norm, linear

from lib import comm
from lib.conjugate import all_gather_reduce_scatter

# ---- 07.1


def gather(x, group):
    return comm.all_gather(x, group, dim=1)


def scatter(x, group):
    return comm.reduce_scatter(x, group, dim=1)


def all_reduce_and_cut(x, group):
    return mine(comm.all_reduce(x, group), group)


def mine(x, group, dim=1):
    return x.chunk(group.size, dim)[group.rank]


def mlp(x, up, up_bias, down, down_bias, group, into=gather, out_of=scatter, bias=1.0, early=0.0):
    """The answer to 07.1, with a place for each mistake."""
    term = gelu(into(x, group) @ up.T + up_bias) @ down.T
    return out_of(term + early * down_bias, group) + bias * down_bias


def mlps(**wrong):
    return lambda *given: mlp(*given, **wrong)


def as_it_is(x, group):
    return x


def right_mlp_by_torch_distributed(x, up, up_bias, down, down_bias, group):
    slices = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(slices, x)
    terms = torch.stack([linear(gelu(linear(part, up, up_bias)), down) for part in slices])
    got = torch.empty_like(terms)
    dist.all_to_all_single(got, terms)
    return got.sum(0) + down_bias


def right_mlp_along_the_rows(*given):
    """Each token is treated by itself, so tokens may be put together as more rows, if they are cut again there."""
    return mlp(*given, into=comm.all_gather, out_of=comm.reduce_scatter)


def gathers_the_weights(x, up, up_bias, down, down_bias, group):
    up, up_bias = comm.all_gather(up, group), comm.all_gather(up_bias, group)
    return gelu(x @ up.T + up_bias) @ comm.all_gather(down, group, dim=1).T + down_bias


# ---- 07.2


def gathers(forward=gather, backward=scatter):
    """The answer to 07.2, with a place for each mistake."""

    class GatherTokens(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            return forward(x, group)

        @staticmethod
        def backward(ctx, gradient):
            return backward(gradient, ctx.group), None

    return GatherTokens


def gather_and_add_up(gradient, group):
    return mine(comm.all_gather(gradient[None], group).sum(0), group)


def all_reduce_of_slices(x, group):
    parts = [torch.zeros_like(x) for _ in range(group.size)]
    parts[group.rank] = x
    return comm.all_reduce(torch.cat(parts, 1), group)


class RightGatherByTorchDistributed(torch.autograd.Function):
    @staticmethod
    def forward(x, group):
        slices = [torch.empty_like(x) for _ in range(group.size)]
        dist.all_gather(slices, x.contiguous())
        return torch.cat(slices, dim=1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx, gradient):
        parts = torch.stack(gradient.chunk(ctx.group.size, dim=1))
        got = torch.empty_like(parts)
        dist.all_to_all_single(got, parts)
        return got.sum(0), None


class RightGatherOfTheLibrary:
    @staticmethod
    def apply(x, group):
        return all_gather_reduce_scatter(x, group, dim=1)


# ---- 07.3


def norm(x, gradient, weight, bias, group, reduce=comm.all_reduce, of_x=lambda g, group: g, change=None):
    """The answer to 07.3, with a place for each mistake."""
    x, weight, bias = (tensor.requires_grad_() for tensor in (x, weight, bias))
    y = layer_norm(x, weight.shape, weight, bias)
    found, *two = torch.autograd.grad(y, (x, weight, bias), gradient)
    if change:
        found, *two = change(x.detach(), gradient, weight.detach(), found, *two)
    return of_x(found, group), *reduce(torch.stack(two), group)


def norms(**wrong):
    return lambda *given: norm(*given, **wrong)


def right_norm_by_hand(x, gradient, weight, bias, group):
    deviation = (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    normal = (x - x.mean(-1, keepdim=True)) / deviation
    both = torch.cat([(gradient * normal).sum((0, 1)), gradient.sum((0, 1))])
    dist.all_reduce(both)
    inside = gradient * weight
    along = normal * (inside * normal).mean(-1, keepdim=True)
    return [(inside - inside.mean(-1, keepdim=True) - along) / deviation, *both.chunk(2)]


def right_norm_by_a_gather(x, gradient, weight, bias, group):
    return norm(x, gradient, weight, bias, group, reduce=lambda two, g: comm.all_gather(two[None], g).sum(0))


def norm_of_all_tokens(x, gradient, weight, bias, group):
    both = comm.all_gather(torch.stack([x, gradient]), group, dim=2)
    found, *two = norm(*both, weight, bias, group, reduce=as_it_is)
    return mine(found, group), *two


def in_two_messages(two, group):
    return [comm.all_reduce(one, group) for one in two]


def only_the_weight(two, group):
    return comm.all_reduce(two[0], group), two[1]


# ---- 07.4


def mask(shape, p, generator=None):
    return (torch.rand(shape, generator=generator) >= p) / (1 - p)


def drawn_seed(group):
    return int(torch.randint(2**40, ())) + group.rank


def masks(p, shape, group, seed=drawn_seed, restores=True, both_inside=False, cut=True, mask=mask):
    """The answer to 07.4, with a place for each mistake."""
    first, number = None if both_inside else mask(shape, p), seed(group)
    state = torch.get_rng_state()
    torch.manual_seed(number)
    first = mask(shape, p) if both_inside else first
    second = mask((shape[0], shape[1] // group.size if cut else shape[1], shape[2]), p)
    if restores:
        torch.set_rng_state(state)
    return first, second


def mask_pairs(**wrong):
    return lambda *given: masks(*given, **wrong)


def right_masks_cut_from_a_whole_one(p, shape, group):
    """Draws n times too many numbers, and those that a serial run would."""
    return mask(shape, p), mine(mask(shape, p), group)


def right_masks_by_a_generator(p, shape, group):
    own = torch.Generator().manual_seed(dist.get_rank() + int(torch.randint(2**40, ())))
    part = (shape[0], shape[1] // dist.get_world_size(), shape[2])
    return [mask(shape, p), mask(part, p, own).double()]


def slice_of_the_first(p, shape, group):
    first = mask(shape, p)
    return first, mine(first, group)


def kept_instead(shape, p):
    return (torch.rand(shape) < p) / (1 - p)


def unscaled(shape, p):
    return torch.rand(shape) >= p


# ---- 07.5


def saved(s, b, h, a, t, sliced, recompute, in_slices=bool, input_cut=bool, mask=1):
    """The answer to 07.5, with a place for each mistake."""
    if recompute == "full":
        return 2 * s * b * h / (t if input_cut(sliced) else 1)
    whole = 8 + 2 * mask
    matrices = (4 + mask) * a * s * s * b / t if recompute == "none" else 0
    return s * b * h * (whole / (t if in_slices(sliced) else 1) + 24 / t) + matrices


def saves(**wrong):
    return lambda *given: saved(*given, **wrong)


def right_saved_piece_by_piece(s, b, h, a, t, sequence_parallel, recompute):
    element, mask, tokens = 2, 1, b * s
    mine = tokens / t if sequence_parallel else tokens
    if recompute == "full":
        return mine * h * element
    between = 4 * mine * h * element + 2 * mine * h * mask
    inside = (3 + 1 + 4 + 4) * tokens * h / t * element
    heads = a // t
    matrices = heads * tokens * s * (2 * element + mask)
    return between + inside + (matrices if recompute == "none" else 0)


def matrices_on_every_rank(s, b, h, a, t, sliced, recompute):
    more = 5 * a * s * s * b * (1 - 1 / t) if recompute == "none" else 0
    return saved(s, b, h, a, t, sliced, recompute) + more


def keeps_the_matrices_only(s, b, h, a, t, sliced, recompute):
    return 5 * a * s * s * b / t if recompute == "selective" else saved(s, b, h, a, t, sliced, recompute)


RIGHT = {
    "07.1": [mlp, right_mlp_by_torch_distributed, right_mlp_along_the_rows],
    "07.2": [gathers(), RightGatherByTorchDistributed, RightGatherOfTheLibrary],
    "07.3": [norm, right_norm_by_hand, right_norm_by_a_gather],
    "07.4": [masks, right_masks_cut_from_a_whole_one, right_masks_by_a_generator],
    "07.5": [saved, right_saved_piece_by_piece],
}
WRONG = {  # in the order of the exercise's mistakes
    "07.1": [
        mlps(out_of=all_reduce_and_cut),
        gathers_the_weights,
        mlps(bias=0, early=1),
        mlps(bias=0),
        mlps(out_of=lambda x, group: comm.reduce_scatter(x, group, dim=1, op="mean")),
        mlps(out_of=mine),
        mlps(into=as_it_is),
        mlps(into=as_it_is, out_of=comm.all_reduce),
        mlps(out_of=comm.all_reduce),
        mlps(out_of=comm.reduce_scatter),
        mlps(into=comm.all_gather),
    ],
    "07.2": [
        gathers(backward=all_reduce_and_cut),
        gathers(backward=gather_and_add_up),
        gathers(forward=all_reduce_of_slices),
        gathers(backward=mine),
        gathers(backward=comm.all_reduce),
        gathers(backward=lambda x, group: comm.reduce_scatter(x, group, dim=1, op="mean")),
        gathers(backward=comm.reduce_scatter),
        gathers(backward=gather),
        gathers(forward=comm.all_gather, backward=comm.reduce_scatter),
    ],
    "07.3": [
        norms(reduce=as_it_is),
        norms(reduce=lambda two, group: comm.all_reduce(two, group, op="mean")),
        norms(of_x=comm.all_reduce),
        norms(reduce=only_the_weight),
        norms(change=lambda x, g, weight, of_x, of_weight, of_bias: (of_x, (g * x).sum((0, 1)), of_bias)),
        norms(change=lambda x, g, weight, of_x, *two: (g * weight, *two)),
        norm_of_all_tokens,
        norms(reduce=in_two_messages),
    ],
    "07.4": [
        mask_pairs(cut=False),
        mask_pairs(seed=lambda group: int(torch.randint(2**40, ()))),
        mask_pairs(both_inside=True),
        slice_of_the_first,
        mask_pairs(restores=False),
        mask_pairs(seed=lambda group: int.from_bytes(os.urandom(5), "big")),
        mask_pairs(seed=lambda group: 1000 + group.rank),
        mask_pairs(mask=kept_instead),
        mask_pairs(mask=unscaled),
    ],
    "07.5": [
        saves(in_slices=lambda sliced: True),
        saves(in_slices=lambda sliced: False),
        matrices_on_every_rank,
        keeps_the_matrices_only,
        lambda *given: saved(*given[:-1], "full" if given[-1] == "full" else "none"),
        lambda *given: 2 * saved(*given),
        saves(mask=2),
        saves(input_cut=lambda sliced: False),
        saves(input_cut=lambda sliced: True),
    ],
}
