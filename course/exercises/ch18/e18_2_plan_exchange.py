"""18.2: the rows that each rank sends to each, and those of each expert here, if experts cannot be shared evenly."""

import torch

from course.check.edits import exercise
from course.check.exercise import kind, several, whole
from lib import comm
from lib.cost.experts import experts_of_rank

CHOICES = 3  # k


def inputs(generator, n):
    """Some ranks have one expert more. Nobody chooses an expert of one rank, nor the last one of all."""
    num_experts = 3 * n + whole(generator, 1, n - 1)
    of_ranks = [experts_of_rank(num_experts, n, rank) for rank in range(n)]
    empty = of_ranks[whole(generator, 0, n)]
    left = [e for e in range(num_experts - 1) if e not in empty]
    found = []
    for rank in range(n):
        tokens = 5 + 2 * rank
        order = torch.rand(tokens, len(left), generator=generator).argsort(1)
        found.append({"chosen": torch.tensor(left)[order[:, :CHOICES]], "num_experts": num_experts})
    return found


def body(answer, group, given):
    result = answer(given["chosen"].clone(), given["num_experts"], group)
    table, sizes = several(result, 2)
    return {"what was returned": kind(result), "table": in_lists(table), "sizes": in_lists(sizes)}


def in_lists(found):
    """Integers of a tensor, as lists of them; anything else unchanged."""
    if torch.is_tensor(found):
        return found.tolist()
    return [in_lists(one) for one in found] if isinstance(found, (list, tuple)) else found


def reference(given):
    """Copy by copy."""
    n, num_experts = len(given), given[0]["num_experts"]
    home = {e: rank for rank in range(n) for e in experts_of_rank(num_experts, n, rank)}
    table = [[0] * n for _ in range(n)]
    total = [0] * num_experts
    for sender, one in enumerate(given):
        for expert in one["chosen"].flatten().tolist():
            table[sender][home[expert]] += 1
            total[expert] += 1
    both = {"what was returned": "2 results", "table": table}
    return [both | {"sizes": [total[e] for e in home if home[e] == rank]} for rank in range(n)]


def plan_exchange(chosen, num_experts, group):
    load = torch.bincount(chosen.flatten(), minlength=num_experts)
    loads = comm.all_gather(load[None], group)
    least, more = divmod(num_experts, group.size)
    held = [least + (rank < more) for rank in range(group.size)]
    parts = loads.split(held, dim=1)
    table = torch.stack([part.sum(1) for part in parts], 1)
    return table, parts[group.rank].sum(0)


def by_tensor_split(chosen, num_experts, group):
    """It cuts just so; lists are returned."""
    load = torch.zeros(num_experts, dtype=torch.long)
    load += torch.nn.functional.one_hot(chosen, num_experts).sum((0, 1))
    parts = comm.all_gather(load, group).view(group.size, -1).tensor_split(group.size, 1)
    rows = [[int(part[i].sum()) for part in parts] for i in range(group.size)]
    return rows, parts[group.rank].sum(0).tolist()


def by_two_messages(chosen, num_experts, group):
    """A table of ranks, and the sum of all loads."""
    ends = torch.tensor([experts_of_rank(num_experts, group.size, r).stop for r in range(group.size)])
    to = torch.searchsorted(ends, chosen.flatten(), right=True)
    row = torch.bincount(to, minlength=group.size)
    total = comm.all_reduce(torch.bincount(chosen.flatten(), minlength=num_experts), group)
    mine = experts_of_rank(num_experts, group.size, group.rank)
    return comm.all_gather(row[None], group), total[mine.start : mine.stop]


def by_turns(num_experts, group):
    """The numbers of the experts of each rank, dealt out."""
    return [[*range(rank, num_experts, group.size)] for rank in range(group.size)]


def dealt(chosen, num_experts, group):
    load = torch.bincount(chosen.flatten(), minlength=num_experts)
    loads = comm.all_gather(load[None], group)
    parts = [loads[:, mine] for mine in by_turns(num_experts, group)]
    return torch.stack([part.sum(1) for part in parts], 1), parts[group.rank].sum(0)


MISTAKES = """
table = torch.stack([part.sum(1) for part in parts], 1) => table = torch.stack([part.sum(1) for part in parts])
    Your table is transposed: table[i][j] is what rank i gets from rank j. It is the table of the way home.
        The rows of the table are the senders: loads has a row for each.
[least + (rank < more) for rank in range(group.size)] => [least] * (group.size - 1) + [least + more]
or (rank < more) => (rank >= group.size - more)
    Your experts that are left over are on the last ranks, or all on the last.
        The first E mod n ranks have one more each: rank r, if r < E mod n.
held = [least + (rank < more) for rank in range(group.size)] => ceil = least + 1
loads.split(held, dim=1) => [loads[:, r * ceil : (r + 1) * ceil] for r in range(group.size)]
    You round E/n up for every rank (chunk does so). The last rank then has too few experts.
        The first E mod n ranks have one more than the rest.
held = [least + (rank < more) for rank in range(group.size)] => held = [least] * group.size
loads.split(held, dim=1) => loads[:, : least * group.size].split(held, dim=1)
    You round E/n down for every rank, so nobody has the last experts, and their copies go nowhere.
        The first E mod n ranks have one more than the rest.
dealt
    You deal the experts out, every n-th to a rank.
        Rank 0 has the first experts, rank 1 the next: neighbours in the sorted order go to the same rank.
comm.all_gather(load[None], group) => load[None].expand(group.size, -1)
    Nothing is sent: your table has this rank's loads in every row. The ranks have different tokens.
        Gather the loads of all ranks, n · E numbers.
comm.all_gather(load[None], group) => comm.all_reduce(load[None], group).expand(group.size, -1)
    Every row of your table has the sum over all ranks.
        Gather the loads, and do not add them up: a row for each sender.
in sizes:
return table, parts[group.rank].sum(0) => return table, parts[group.rank][group.rank]
    Your table is right. Your sizes count the copies of this rank's tokens alone.
        Copies come from all ranks: add up the column of each expert.
return table, parts[group.rank].sum(0) => return table, parts[group.rank].sum(1)
    Your table is right. Your sizes are the copies of each sender, and not of each expert.
        Add up over the senders.
return table, parts[group.rank].sum(0) => return table, parts[0].sum(0)
    Your table is right. Your sizes are those of the experts of rank 0.
        Take the part of group.rank.
return table, parts[group.rank].sum(0) => return table, loads.sum(0)
    Your table is right. Your sizes are those of all experts.
        Return those of the experts that this rank has.
return table, parts[group.rank].sum(0) => return table, parts[group.rank]
    Your table is right. Your sizes have a row for each sender.
        Add up over the senders: one number for each expert here.
return table, parts[group.rank].sum(0) => return table, parts[group.rank].sum()
    Your table is right. Your sizes are one number, all the copies that come.
        An expert must know which of them are its copies: one number for each expert here.
in table:
return table, parts[group.rank].sum(0) => return table - table.diag().diag(), parts[group.rank].sum(0)
    Your table has zeros for the copies that stay on their rank. The all-to-all moves them as well, from the input to
    the output.
        Leave them in.
return table, parts[group.rank].sum(0) => return table[group.rank], parts[group.rank].sum(0)
    You return one row of the table. An all-to-all also needs the column: how many come from each rank.
        Return all rows.
return table, parts[group.rank].sum(0) => return table.cumsum(1), parts[group.rank].sum(0)
    Your table has the places where copies end, and not their numbers.
        Leave out the cumulative sum.
in all:
chosen.flatten(), minlength => chosen[:, 0], minlength
    You count the first choice of each token.
        A token has k copies: all its choices count.
comm.all_gather(load[None], group) => comm.all_gather((load[None] > 0).long(), group)
    You count an expert once, however many copies go to it.
        Count the copies.
returns result[::-1]
    Your two results are in the reverse order.
        Return the table first.
"""

EXERCISE = exercise(globals(), points=1, right=(plan_exchange, by_tensor_split, by_two_messages))
