"""What a program of plain PyTorch made of a model: the change of each weight.

Changes and not weights are compared: a weight is much larger than its change, in which a mistake shows.
"""

import copy

from course.practise.foreign import one_process


def changes(train, given, *last):
    """By how much `train` changes each weight of a copy of the given model, in each of the given runs.

    A weight that is cut, as a DTensor is, is gathered. Also how many elements of each weight this rank holds, by its
    name, and the most sequences in one forward.

    Args:
        train: (model, the arguments of a run, `last`).
        given: "model"; and "runs": the name of each run → its arguments, of which the first are its batches.
    """
    found, elements, rows = {}, {}, []
    for when, arguments in given["runs"].items():
        model = copy.deepcopy(given["model"])
        model.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
        train(model, *arguments, *last)
        for name, p in model.named_parameters():
            here = p.to_local() if hasattr(p, "to_local") else p
            everywhere = p.full_tensor() if hasattr(p, "full_tensor") else p
            elements[name] = here.numel()
            found[f"change of {name} in {when}"] = everywhere.detach() - given["model"].get_parameter(name).detach()
    return found, elements, max(rows, default=0)


def right_changes(given):
    """The same changes by one process, on every rank."""
    found, _, _ = changes(one_process, given[0])
    return [found] * len(given)
