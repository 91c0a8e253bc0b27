"""Small traces of runs that never ran: what each rank does, timed by hand, in the words of NCCL or of gloo."""

import json
from collections import defaultdict


def timed(programs):
    """Rank → (start, end, operation) in µs of the programs of all ranks, which wait for each other as real ones do.

    Operations: ("compute", µs), ("sleep", µs), (kind, ranks, µs) for a collective, ("send", peer, µs), ("recv", peer,
    µs). A send does not wait.
    """
    at, rows = dict.fromkeys(programs, 0.0), defaultdict(list)
    todo = {rank: list(program) for rank, program in programs.items()}
    sent = defaultdict(list)  # (from, to) → when each message arrives
    while any(todo.values()):
        moved = False
        for rank, ops in todo.items():
            while ops:
                op, *args, us = ops[0]
                start = at[rank]
                if op in ("compute", "sleep"):
                    end = start + us
                elif op == "send":
                    end = start + us
                    sent[rank, args[0]].append(end)
                elif op == "recv":
                    if not sent[args[0], rank]:
                        break
                    end = max(start + us, sent[args[0], rank].pop(0))
                else:
                    break
                rows[rank].append((start, end, ops.pop(0)))
                at[rank], moved = end, True
        for ops in todo.values():
            if ops and isinstance(ops[0][1], tuple):
                op, ranks, us = ops[0]
                if all(todo[other] and todo[other][0] == ops[0] for other in ranks):
                    end = max(at[other] for other in ranks) + us
                    for other in ranks:
                        rows[other].append((at[other], end, todo[other].pop(0)))
                        at[other] = end
                    moved = True
        assert moved, f"they wait for each other: {todo}"
    return rows


NAMES = {  # kind → kernel of NCCL, its fact, call of gloo
    "all_reduce": ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", "allreduce", "gloo:all_reduce"),
    "all_gather": ("ncclDevKernel_AllGather_RING_LL(x)", "_allgather_base", "gloo:all_gather"),
    "reduce_scatter": ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(x)", "_reduce_scatter_base", ""),
    "all_to_all": ("ncclDevKernel_SendRecv(x)", "all_to_allv", "gloo:all_to_all"),
    "send": ("ncclDevKernel_SendRecv(x)", "send", "gloo:send"),
    "recv": ("ncclDevKernel_SendRecv(x)", "recv", "gloo:recv"),
}


class Run:
    """A run of some ranks: `files()` are the contents of their trace files.

    Args:
        programs: rank → operations.
        groups: the process groups, in the order in which they were made: (description, ranks).
        backend: nccl or gloo.
        seq: whether calls are numbered.
        host: rank → name of its machine, None for a file without it.
        ahead: rank → µs of its clock.
    """

    def __init__(self, programs, groups, backend="nccl", seq=True, host=lambda rank: "a", ahead=lambda rank: 0.0):
        self.rows, self.groups, self.backend, self.seq = timed(programs), groups, backend, seq
        self.host, self.ahead, self.world = host, ahead, len(programs)

    def names(self, rank):
        """Ranks of a group → its name in the file of a rank."""
        return {ranks: str(i) for i, (_, ranks) in reversed([*enumerate(self.groups)])}

    def file(self, rank):
        names, counts, events = self.names(rank), defaultdict(int), []
        for i, (start, end, (op, *args, _)) in enumerate(self.rows[rank]):
            when = {"ph": "X", "ts": start + self.ahead(rank), "dur": end - start}
            if op == "sleep":
                continue
            if op == "compute":
                events.append(when | self.computes(i))
                continue
            if op in ("send", "recv"):
                group, facts = names[tuple(range(self.world))], self.peer(op, args[0])
            else:
                group, facts = names[args[0]], {"Group size": len(args[0])}
                counts[group] += 1
                facts |= {"Seq": counts[group]} if self.seq else {}
            events += self.communicates(op, i, when, group, facts, args[0])
        info = {"backend": self.backend, "rank": rank, "world_size": self.world, "pg_config": self.told(rank)}
        host = {"host_name": self.host(rank)} if self.host(rank) else {}
        return {"schemaVersion": 1, "distributedInfo": info, "traceEvents": events} | host

    def told(self, rank):
        its = [(str(i), *group) for i, group in enumerate(self.groups) if rank in group[1]]
        return [{"pg_name": name, "pg_desc": desc, "ranks": list(ranks)} for name, desc, ranks in its]

    @staticmethod
    def peer(op, peer):
        return {"Dst Rank" if op == "send" else "Src Rank": peer}

    def computes(self, i):
        if self.backend == "gloo":
            return {"cat": "cpu_op", "name": "aten::mm", "tid": 1, "args": {}}
        return {"cat": "kernel", "name": "gemm", "tid": 7, "args": {"External id": i, "correlation": i}}

    def communicates(self, op, i, when, group, facts, whom):
        kernel, fact, call = NAMES[op]
        if self.backend == "gloo":
            if op in ("send", "recv"):
                c10d = {"send": "c10d::send", "recv": "c10d::recv_"}[op]
                called = {
                    "cat": "cpu_op",
                    "name": c10d,
                    "tid": 1,
                    "args": {"Concrete Inputs": ["", "", str(whom), "0"]},
                }
                done = {"cat": "user_annotation", "name": call, "tid": 1}
                return [when | called | {"dur": 1}, when | done | {"args": {"Input Dims": [[10]]}}]
            args = {"Input Dims": [[10]], "Input type": ["float"]}
            return [when | {"cat": "user_annotation", "name": call, "tid": 100 + int(group), "args": args}]
        facts = facts | {
            "Collective name": fact,
            "In msg nelems": 10,
            "Out msg nelems": 10,
            "dtype": "Float",
            "Process Group Name": group,
        }
        said = {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "ts": when["ts"] - 1, "dur": 1, "tid": 1}
        said |= {"args": facts | {"External id": 10_000 + i}}
        args = {"External id": 10_000 + i, "correlation": i}
        return [said, when | {"cat": "kernel", "name": kernel, "tid": 20, "args": args}]

    def files(self, but=()):
        return {f"rank{rank}.json": self.file(rank) for rank in range(self.world) if rank not in but}


def written(folder, files):
    """Paths of files; a value may be text, or bytes."""
    paths = []
    for name, content in files.items():
        path = folder / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        paths.append(path)
    return paths
