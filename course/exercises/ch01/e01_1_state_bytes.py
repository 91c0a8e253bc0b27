"""01.1: bytes of the model states by kind, with all parameters trained or with low-rank adapters."""

from itertools import product

from course.check.edits import exercise
from course.check.exercise import call, whole

KINDS = ("parameter", "gradient", "optimizer")


def inputs(generator, n):
    matrices = [(whole(generator, 100, 5000), whole(generator, 100, 5000)) for _ in range(whole(generator, 2, 4))]
    matrices.append(matrices[0])  # two matrices of one shape are two
    adapters = (None, whole(generator, 4, 65))
    return [{"cases": [(matrices, *c) for c in product(adapters, ("float32", "mixed"), ("SGD", "momentum", "Adam"))]}]


def body(answer, group, given):
    found = {}
    for case in given["cases"]:
        result, title = answer(*case), call("state_bytes", case)
        found |= {f'{title}["{kind}"]': of_kind(result, kind) for kind in KINDS}
    return found


def of_kind(result, kind):
    """The entry of a dict, or in words what there is in its place."""
    if not isinstance(result, dict):
        return result if result is None else f"no dict: a {type(result).__name__}"
    return result.get(kind, f"no such key in {', '.join(map(str, result)) or 'an empty dict'}")


def state_bytes(matrices, q, precision, optimizer):
    full = sum(rows * columns for rows, columns in matrices)
    if q is None:
        frozen, trained = 0, full
    else:
        frozen = full
        trained = sum(q * (rows + columns) for rows, columns in matrices)
    number_bytes = {"float32": 4, "mixed": 2}[precision]
    moments = {"SGD": 0, "momentum": 1, "Adam": 2}[optimizer]
    master_bytes = 4 if precision == "mixed" else 0
    return {
        "parameter": number_bytes * (frozen + trained),
        "gradient": number_bytes * trained,
        "optimizer": (master_bytes + 4 * moments) * trained,
    }


def tensor_by_tensor(matrices, q, precision, optimizer):
    moments = {"SGD": 0, "momentum": 4, "Adam": 8}[optimizer]
    of_trained = (4, 4, moments) if precision == "float32" else (2, 2, 4 + moments)
    total = dict.fromkeys(KINDS, 0)
    for rows, columns in matrices:
        total["parameter"] += 0 if q is None else rows * columns * of_trained[0]
        for kind, n_bytes in zip(KINDS, of_trained, strict=True):
            total[kind] += n_bytes * (rows * columns if q is None else rows * q + q * columns)
    return total


MISTAKES = """
4 if precision == "mixed" else 0 => 0
    Master weights are missing.
        In mixed precision any optimizer steps float32 copies: 4 bytes per trained parameter.
=> 4
    You also have master weights in float32.
        There the parameter itself is precise enough, and no copy is kept.
(frozen + trained) => (frozen + trained) + master_bytes * trained
(master_bytes + 4 * moments) => (4 * moments)
    The sum is right. But master weights belong to the optimizer.
        Only its step reads them, and ZeRO-1 shards them.
4 if precision == "mixed" else 0 => 4 if precision == "mixed" and optimizer == "Adam" else 0
    You have master weights with Adam alone.
        SGD steps float32 copies too: under each optimizer, 4 bytes per trained parameter.
"Adam": 2 => "Adam": 1
    You keep one moment per parameter.
        Adam keeps two, of the gradient and of its square.
(master_bytes + 4 * moments) => (master_bytes + number_bytes * moments)
    You keep the moments in 16 bits.
        In mixed precision they stay in float32, 4 bytes each.
number_bytes * trained => 4 * trained
    You keep gradients in float32, as some frameworks do (18 bytes with Adam).
        Here they have the parameters' 2 bytes.
lambda matrices, *more: state_bytes([*set(matrices)], *more)
    You count matrices of the same shape once. Each has its own memory.
        Go through the list.
if q is None => if True
    You count a run that trains all matrices, also where there are adapters.
        With a number q the matrices are frozen, and the adapters beside them are trained.
sum(q * (rows + columns) for => sum(q * rows for
or sum(q * (rows + columns) for => sum(q * columns for
    You count one small matrix beside each matrix. There are two.
        Their elements are rows · q and q · columns.
sum(q * (rows + columns) for => sum(q * rows * columns for
    Your adapters have q times as many elements as the matrices. They are small.
        Their elements are rows · q and q · columns.
number_bytes * trained => number_bytes * (frozen + trained)
(master_bytes + 4 * moments) * trained => (master_bytes + 4 * moments) * (frozen + trained)
    With adapters you count all states of the frozen matrices as well.
        Go through the kinds: who would read each?
=> (master_bytes + 4 * moments) * trained + master_bytes * frozen
    Your frozen matrices have master weights.
        A master weight adds up small steps, and a frozen matrix takes none.
in ["gradient"]: number_bytes * trained => number_bytes * (frozen + trained)
    Your frozen matrices have gradients.
        Backward passes through them, but computes none: no step would use one.
in ["optimizer"]: (master_bytes + 4 * moments) * trained => (master_bytes + 4 * moments) * (frozen + trained)
    Your optimizer keeps states of frozen matrices.
        It updates the adapters alone: moments and master weights of these.
=> (master_bytes + 0 * moments) * trained
    You count no moments. The first step has made them, and the second reads them.
        Add 4 bytes per trained parameter and moment.
=> (master_bytes + 4 * moments) * trained + (moments == 2) * 4 * len(matrices) * (1 if q is None else 2)
    You also count Adam's step counts, 4 bytes for each tensor.
        Here the optimizer holds moments and master weights.
in ["gradient"]: number_bytes * trained => 0
    You count no gradients. Right before the step they are there, and the step reads them.
        Count the gradients of what is trained.
in ["parameter"]:
number_bytes * (frozen + trained) => number_bytes * trained
    With adapters your parameters are the adapters'.
        Forward multiplies by the frozen matrices too: they stay in memory.
=> number_bytes * full
    The adapters are parameters too.
        Add their bytes to those of the frozen matrices.
"""

EXERCISE = exercise(
    globals(),
    points=2,
    right=(state_bytes, tensor_by_tensor),
    reference=lambda given: [{name: float(x) for name, x in body(state_bytes, None, given[0]).items()}],
    ranks=(1,),
)
