"""Answers to the exercises of `memory_sums` and `memory_live`: right ones, and one for each named mistake."""

import torch
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

# ---- 01.1


def recipe(weight, gradient, master, averages, in_float32=(4, 4, 0), average=4.0, master_as="optimizer"):
    def answer(num_parameters, precision, optimizer):
        w, g, m = (weight, gradient, master) if precision == "mixed" else in_float32
        held = {
            "parameter": w,
            "gradient": g,
            "optimizer": averages[optimizer] * (average if precision == "mixed" else 4),
        }
        held[master_as] += m
        return {kind: n_bytes * num_parameters for kind, n_bytes in held.items()}

    return answer


AVERAGES = {"SGD": 0, "momentum": 1, "Adam": 2}


def right_state_case_by_case(num_parameters, precision, optimizer):
    remembered = {"SGD": 0, "momentum": 4, "Adam": 8}[optimizer]
    if precision == "float32":
        each = (4, 4, remembered)
    else:
        each = (2, 2, 4 + remembered)
    return dict(zip(("gradient", "parameter", "optimizer"), (n * num_parameters for n in each), strict=True))


# ---- 01.2


def stages(needs, fits=lambda need, room: need <= room, order=(0, 1, 2, 3)):
    def answer(num_parameters, ranks, memory_bytes):
        for zero in order:
            if fits(needs(num_parameters, ranks)[zero], memory_bytes):
                return zero
        return None

    return answer


def per_rank(p, n, optimizer=12):
    return [
        2 * p + 2 * p + optimizer * p,
        2 * p + 2 * p + optimizer * p / n,
        2 * p + (2 + optimizer) * p / n,
        (4 + optimizer) * p / n,
    ]


def right_stage_from_above(num_parameters, ranks, memory_bytes):
    best = None
    for zero in (3, 2, 1, 0):
        kept = [16, 4 + 12 / ranks, 2 + 14 / ranks, 16 / ranks][zero]
        if num_parameters * kept <= memory_bytes:
            best = zero
    return best


# ---- 01.3


def storages(tensors):
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def held(model, optimizer):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    states = [v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
    return {"parameter": list(model.parameters()), "gradient": grads, "optimizer": states}


def right_live(model, optimizer):
    return {kind: storages(tensors) for kind, tensors in held(model, optimizer).items()}


def right_live_by_walking(model, optimizer):
    total, seen = {"parameter": 0, "gradient": 0, "optimizer": 0}, set()

    def add(kind, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total[kind] += storage.nbytes()

    for module in model.modules():
        for p in module._parameters.values():
            if p is not None:
                add("parameter", p)
                if p.grad is not None:
                    add("gradient", p.grad)
    for group in optimizer.param_groups:
        for p in group["params"]:
            for value in optimizer.state[p].values():
                if isinstance(value, torch.Tensor):
                    add("optimizer", value)
    return total


def live(**counts):
    """The right answer, but for some kinds."""

    def answer(model, optimizer):
        tensors = held(model, optimizer)
        return right_live(model, optimizer) | {k: count(model, tensors[k]) for k, count in counts.items()}

    return answer


def numbers(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def four_bytes(model, tensors):
    return 4 * sum(t.numel() for t in tensors)


def by_name(model, tensors):
    return numbers(dict(model.named_parameters(remove_duplicate=False)).values())


# ---- 01.4


def choice(layer, order=("none", "selective", "full")):
    def answer(rows, tokens, width, heads, layers, memory_bytes):
        for how in order:
            if layer(rows, tokens, width, heads)[how] * layers <= memory_bytes:
                return how
        return None

    return answer


def layer(b, s, h, a, full=2, rows=True, matrix=5):
    sbh = s * h * (b if rows else 1)
    return {"none": sbh * (34 + matrix * a * s / h), "selective": 34 * sbh, "full": full * sbh}


def right_choice_unrolled(b, s, h, a, L, memory_bytes):
    if L * (34 * s * b * h + 5 * a * s * s * b) <= memory_bytes:
        return "none"
    if L * 34 * s * b * h <= memory_bytes:
        return "selective"
    return "full" if 2 * L * s * b * h <= memory_bytes else None


def one_layer(b, s, h, a, L, memory_bytes):
    return right_choice_unrolled(b, s, h, a, 1, memory_bytes)


# ---- 01.5


def right_days(num_parameters, tokens, gpus, peak_flops, utilisation):
    return 6 * num_parameters * tokens / (gpus * peak_flops * utilisation) / 86_400


def right_days_step_by_step(num_parameters, tokens, gpus, peak_flops, utilisation):
    a_day = peak_flops * 3600 * 24 * utilisation * gpus
    return torch.tensor(2 * num_parameters * tokens / a_day + 4 * num_parameters * tokens / a_day)


# ---- 01.6


def right_blocks(blocks, x):
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def right_blocks_but_for_the_last(blocks, x):
    return checkpoint_sequential(blocks, len(blocks), x, use_reentrant=False)


class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, *weights):
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        weights = list(ctx.block.parameters())
        return None, *torch.autograd.grad(y, [x, *weights], gradient)


def right_blocks_by_hand(blocks, x):
    for block in blocks:
        x = Again.apply(block, x, *block.parameters())
    return x


def keeps_all(blocks, x):
    for block in blocks:
        x = block(x)
    return x


def one_checkpoint(blocks, x):
    return checkpoint(keeps_all, blocks, x, use_reentrant=False)


def without_history(blocks, x):
    with torch.no_grad():
        return keeps_all(blocks, x)


def cuts(blocks, x):
    for block in blocks:
        x = checkpoint(block, x.detach(), use_reentrant=False)
    return x


RIGHT = {
    "01.1": [recipe(2, 2, 4, AVERAGES), right_state_case_by_case],
    "01.2": [stages(per_rank), right_stage_from_above],
    "01.3": [right_live, right_live_by_walking],
    "01.4": [choice(layer), right_choice_unrolled],
    "01.5": [right_days, right_days_step_by_step],
    "01.6": [right_blocks, right_blocks_but_for_the_last, right_blocks_by_hand],
}
WRONG = {  # in the order of the exercise's mistakes
    "01.1": [
        recipe(2, 2, 0, AVERAGES),
        recipe(2, 2, 4, AVERAGES, in_float32=(4, 4, 4)),
        recipe(2, 2, 4, AVERAGES, master_as="parameter"),
        recipe(2, 2, 4, AVERAGES | {"Adam": 1}),
        recipe(2, 2, 4, AVERAGES, average=2),
        recipe(2, 4, 4, AVERAGES),
    ],
    "01.2": [
        stages(lambda p, n: [16 * p / n] * 4),
        stages(lambda p, n: per_rank(p, n, optimizer=8)),
        stages(lambda p, n: [16 * p, 2 * p + 12 * p + 2 * p / n, 2 * p + 14 * p / n, 16 * p / n]),
        stages(per_rank, order=(3, 2, 1, 0)),
        stages(per_rank, fits=lambda need, room: need < room),
        stages(lambda p, n: [*per_rank(p, n)[:3], 2 * p + 14 * p / n]),
    ],
    "01.3": [
        live(parameter=four_bytes, gradient=four_bytes),
        live(parameter=by_name),
        live(gradient=lambda model, tensors: numbers(tensors)),
        live(gradient=lambda model, tensors: sum(t.untyped_storage().nbytes() for t in tensors)),
        live(optimizer=lambda model, tensors: numbers(t for t in tensors if t.dim())),
        live(parameter=lambda model, tensors: numbers(t for t in tensors if t.requires_grad)),
    ],
    "01.4": [
        one_layer,
        choice(lambda b, s, h, a: layer(b, s, h, a, matrix=0)),
        choice(lambda b, s, h, a: layer(b, s, h, a, rows=False)),
        choice(layer, order=("full", "selective", "none")),
        choice(lambda b, s, h, a: layer(b, s, h, a, full=0)),
    ],
    "01.5": [
        lambda n, d, gpus, peak, part: right_days(n, d, gpus, peak, part) / 3,
        lambda n, d, gpus, peak, part: 8 * n * d / (gpus * peak * part * 86_400),
        lambda n, d, gpus, peak, part: 6 * n * d / (gpus * peak * 86_400),
        lambda n, d, gpus, peak, part: 6 * n * d / (gpus * peak * 86_400) * part,
        lambda n, d, gpus, peak, part: right_days(n, d, 1, peak, part),
        lambda n, d, gpus, peak, part: 6 * n * d / (gpus * peak * part) / 3600,
        lambda n, d, gpus, peak, part: 6 * n * d / (gpus * peak * part),
    ],
    "01.6": [keeps_all, one_checkpoint, without_history, cuts],
}
