"""Combine all axes: turn a model and a mesh into shards, stages, gradients and an optimizer that fit together.

The problem: the ranks over which a gradient must be summed depend on all axes: a norm may work on a shard of the
sequence, an embedding may have a second use on a different stage.
The idea: each technique is applied to the model in turn, and keeps the serial names. Then the two facts of every
parameter follow from the mesh (`gradient_ranks.py`), and the rest is composition:

    tensor_parallel(model, mesh.group("tp"))                    each rank has shards of the matrices
    context_parallel(model, mesh.group("cp"))                   … and some tokens of each sequence
    expert_parallel(model, groups)                              … and some of the experts
    stages = stages_of(model, schedule, mesh.group("pp").rank)  … of some of the layers
    facts = facts_of(stages, mesh, schedule.rank_of)
    sums = Gradients(facts)                                     … whose gradients are sums over these ranks
    optimizer = ShardedOptimizer(sums, adamw)

An unused technique is an axis with one rank. Only the first four depend on the model: `parallelize` knows them for a
GPT, and `assemble` takes them as functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from lib.context_parallel.gpt import context_parallel, token_places
from lib.context_parallel.tokens import take_tokens
from lib.cost.sizes import BUCKET_BYTES
from lib.data_parallel.bucketed_gradients import Gradients
from lib.data_parallel.check_optimizer import check_groups
from lib.data_parallel.ddp import broadcast_weights, check_unbalanced
from lib.data_parallel.flat import MakeOptimizer
from lib.data_parallel.fsdp import FSDP
from lib.data_parallel.optimizer import ShardedOptimizer
from lib.data_parallel.zero import check_range, kept_precise, sharded_gradients
from lib.documents import documents_of
from lib.expert_parallel.layer import ExpertGroups, expert_parallel
from lib.facts import serial_names
from lib.gradient_hooks import check_linear_hooks
from lib.gradient_ranks import facts_of
from lib.launch import device
from lib.layout import TOKEN_AXES, Layout
from lib.masks import check_rows, drop_by_rows
from lib.mesh import Group, Mesh, MeshShape
from lib.model import GPT
from lib.moe import ExpertOptions, Experts, MoE
from lib.parallel_model import BatchLoss, ParallelModel
from lib.pipeline.lower import lower
from lib.pipeline.schedules.with_reduce import with_reduce
from lib.pipeline.stage import Stage, check_cut, cut, tie
from lib.placement import of_experts, parts, with_experts
from lib.placement import shard as shard_of
from lib.tensor_parallel.custom_layers import check_full
from lib.tensor_parallel.gpt import tensor_parallel
from lib.tensor_parallel.tokenwise import check_expert_rows, check_tokenwise
from lib.tensor_parallel.vocab import vocab_parallel_loss

ParallelGPT = ParallelModel  # its former name


def parallelize(
    model: GPT,
    mesh: Mesh,
    layout: Layout,
    optimizer: MakeOptimizer,
    *,
    seed: int = 0,
    bucket_bytes: int = BUCKET_BYTES,
    dtype: torch.dtype | None = None,
) -> ParallelModel:
    """Parallelize a GPT: return this rank's shards, ready for a training loop; the same call on all ranks.

    Args:
        model: full model; it is moved to this rank's device, all ranks take the values of rank 0, and parameters not
            needed on this rank are freed. Custom layers stay full on the tensor-parallel ranks, or are refused
            (`tensor_parallel/custom_layers.py`).
        mesh: `Mesh(MeshShape(**layout.sizes), world)`.
        optimizer: function called with pairs of name and piece; it may look at names and attributes of parameters.
        seed: seed of dropout. The elements that `nn.Dropout` drops do not depend on the layout.
        bucket_bytes: size of gradient buckets, up to `zero=2`.
        dtype: dtype of computation and communication; needs `zero`, which keeps master weights.

    Raises:
        ValueError: not a GPT, a layer in it that this layout would compute differently, a mesh that does not match the
            layout, a size that cannot be split evenly, nothing to train, parameters that share memory, an optimizer
            that would treat shards differently, or a dtype that needs loss scaling.
    """
    if not isinstance(model, GPT):
        raise ValueError(
            f"parallelize takes a GPT of lib/model.py, and {type(model).__name__} is none: use assemble(), which takes "
            "any model, or FSDP, ZeRO1 or BucketedDDP of lib/data_parallel"
        )
    check_full(model)
    _check_mesh(mesh, layout)
    check_linear_hooks(model, layout)
    _check_mixtures(model, layout)
    if layout.pp > 1:
        check_cut(model)
    if layout.cp > 1:
        check_tokenwise(model)
    tp, cp = mesh.group("tp"), mesh.group_of_some("cp")

    def shard(model: GPT) -> None:
        model.finds_documents = False  # a stage, or a rank, has not all tokens
        tensor_parallel(model, tp, layout.sequence_parallel, layout.recompute)
        slices = (tp.rank, tp.size) if layout.sequence_parallel else (0, 1)
        shares = cp if layout.attention == "ulysses" else Group()  # those of the heads of a tensor-parallel rank
        heads = tp.rank * shares.size + shares.rank, tp.size * shares.size
        tokens = token_places(cp, layout.token_order, slices) if layout.cp > 1 else slices
        drop_by_rows(model, heads, tokens)
        if layout.cp > 1:
            context_parallel(model, cp, layout.attention, layout.token_order)
        if any(isinstance(module, MoE) for module in model.modules()):
            expert_parallel(model, _expert_groups(mesh, layout))

    def stage(module: nn.Module) -> Stage:
        return Stage(module, model.config.d_model, slices=model.sequence_slices)

    def loss(targets_BT: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """The mean over all tokens that count."""
        count = (targets_BT != -100).sum().to(device())
        return partial(vocab_parallel_loss, group=tp, count=count)

    how = {"seed": seed, "bucket_bytes": bucket_bytes, "dtype": dtype}
    if layout.cp > 1:
        how["part_of"] = partial(take_tokens, group=cp, order=layout.token_order)
    if model.config.document_end is not None and model.finds_documents:
        how["documents_of"] = partial(documents_of, end=model.config.document_end)
    return _assemble(model, mesh, layout, optimizer, loss, shard, cut, stage, **how)


def _expert_groups(mesh: Mesh, layout: Layout) -> ExpertGroups:
    sliced = ("tp",) if layout.sequence_parallel else ()
    return ExpertGroups(
        ep=mesh.fold(*TOKEN_AXES, inner=layout.ep, names=("ep", "edp"))[0],
        tp=mesh.group_of_some("tp"),
        tokens=mesh.group_of_some(*TOKEN_AXES, *sliced),
        sequence=mesh.group_of_some("cp", *sliced),
        batch_pieces=layout.dp * layout.microbatches,
        sequence_parallel=layout.sequence_parallel,
        capacity_over=layout.capacity_over,
    )


def assemble(
    model: nn.Module,
    mesh: Mesh,
    layout: Layout,
    optimizer: MakeOptimizer,
    *,
    loss: BatchLoss,
    shard: Callable[[nn.Module, Group], object] | None = None,
    cut: Callable[[nn.Module, int], Sequence[nn.Module]] | None = None,
    stage: Callable[[nn.Module], Stage] = Stage,
    seed: int = 0,
    bucket_bytes: int = BUCKET_BYTES,
    dtype: torch.dtype | None = None,
) -> ParallelModel:
    """Parallelize a model that is yours: this rank's part, ready for a training loop; the same call on all ranks.

    Args:
        model: the full model, of any kind; it is moved to this rank's device, and all ranks take the values of rank
            0. The batch is the first dim of what it takes and gives.
        mesh: `Mesh(MeshShape(**layout.sizes), world)`.
        optimizer: function called with pairs of name and piece, such as `partial(torch.optim.AdamW, lr=3e-4)`.
        loss: function from all targets of a batch, [B, …], to a function from (output, targets) of some of its rows
            to their term in the loss of the batch: the terms of all rows add up to it.
        shard: puts tensor-parallel layers into the model, in place; called with it and the ranks of `tp`. It is
            needed if tp is 2 or more.
        cut: function from the model and a number of stages to the module of each stage, in order, on every rank. It
            is needed if pp is 2 or more. Each parameter is in one of them; a tied one may be in several.
        stage: makes a `Stage` of such a module; `partial(Stage, form=…)` says what the stages send.
        seed: seed of dropout. The elements that `nn.Dropout` drops do not depend on the layout.
        bucket_bytes: size of gradient buckets, up to `zero=2`.
        dtype: dtype of computation and communication; needs `zero`, which keeps master weights.

    Raises:
        ValueError: a layout that this model, these functions or this mesh do not allow; a parameter in no stage, or
            tied before `shard` and not after it; dropout in a model that is sharded; nothing to train, or parameters
            that share memory.

    Example:
        from functools import partial

        import torch
        from torch import nn

        from lib.layout import Layout
        from lib.mesh import Mesh, MeshShape
        from lib.parallel import assemble

        def loss(targets):
            return lambda y, some: (y - some).square().sum() / len(targets)

        layout = Layout(dp=2, zero=1)
        mesh, adamw = Mesh(MeshShape(**layout.sizes), world), partial(torch.optim.AdamW, lr=1e-2)
        model = assemble(nn.Linear(4, 1), mesh, layout, adamw, loss=loss)
        before = model.step(torch.ones(8, 4), torch.zeros(8, 1), max_norm=1.0)
        assert model.evaluate(torch.ones(8, 4), torch.zeros(8, 1)) < before
    """
    kind = type(model).__name__
    _check_mesh(mesh, layout)
    if layout.tp > 1 and shard is None:
        raise ValueError(f"tp={layout.tp} shards the layers of {kind}: give shard=, which puts parallel layers in")
    if layout.pp > 1 and cut is None:
        raise ValueError(f"pp={layout.pp} cuts {kind} into stages: give cut=, which returns their modules")
    if layout.cp > 1:
        raise ValueError(
            f"cp={layout.cp} is for a GPT, whose attention reaches the tokens of all ranks: use parallelize, or cp=1"
        )
    if layout.ep > 1:
        raise ValueError(f"ep={layout.ep} is for a GPT, whose experts ranks can share: use parallelize, or ep=1")
    check_unbalanced(model)
    check_linear_hooks(model, layout)
    if layout.recompute != "none":
        raise ValueError(
            f"recompute={layout.recompute} is for a GPT: give stage=partial(Stage, recompute=True), which keeps the "
            "input of a stage alone, or recompute inside your layers"
        )
    if layout.sequence_parallel:
        raise ValueError("sequence_parallel is for a GPT: let shard= put in layers that have it, and stage=, slices=")

    def shard_own(model: nn.Module) -> None:
        if shard and mesh.group("tp").size > 1:
            shard(model, mesh.group("tp"))
        dropped = [name for name, m in model.named_modules() if isinstance(m, nn.Dropout) and m.p]
        if dropped and layout.tp > 1:
            raise ValueError(
                f"{dropped[0]} would drop other elements on {layout.tp} tensor-parallel ranks than in one process: "
                "set p=0, or let shard= replace it by RowDropout of lib/masks.py"
            )
        drop_by_rows(model)

    how = {"seed": seed, "bucket_bytes": bucket_bytes, "dtype": dtype}
    return _assemble(model, mesh, layout, optimizer, loss, shard_own, cut, stage, **how)


def _assemble(
    model: nn.Module,
    mesh: Mesh,
    layout: Layout,
    optimizer: MakeOptimizer,
    loss: BatchLoss,
    shard: Callable[[nn.Module], object],
    cut: Callable[[nn.Module, int], Sequence[nn.Module]] | None,
    stage: Callable[[nn.Module], Stage],
    *,
    seed: int,
    bucket_bytes: int,
    dtype: torch.dtype | None,
    **more: Callable[[Tensor], Tensor],
) -> ParallelModel:
    """Each technique in turn: values, shards, stages, facts, sums, optimizer."""
    _check(model, layout, optimizer, dtype)
    serial = serial_names(model)
    model.to(device())
    broadcast_weights(model, mesh.world)
    shard(model)
    _check_shards(model, serial, mesh.group("tp"))
    schedule = layout.make_schedule()
    modules = cut(model, schedule.num_stages) if cut and schedule.num_stages > 1 else [model]
    _check_stages(model, modules, schedule.num_stages)
    tie(modules)
    stages = {s: stage(modules[s]) for s in schedule.stages_on(mesh.group("pp").rank)}
    norm_over = mesh.world if layout.zero or layout.ep > 1 else mesh.group("pp", "tp")
    names = {id(p): name for name, p in model.named_parameters()}
    facts = facts_of(stages, mesh, schedule.rank_of, norm_over, names)
    if layout.zero == 3:
        owner = FSDP(model, mesh.group_of_some(*TOKEN_AXES), optimizer, op="sum", dtype=dtype, facts=facts)
    elif layout.zero:
        owner = ShardedOptimizer(sharded_gradients(facts, layout.zero, "sum", bucket_bytes, dtype), optimizer)
    else:
        owner = ShardedOptimizer(Gradients(facts, "sum", bucket_bytes), optimizer)
    lowered = lower(with_reduce(schedule, each=layout.zero >= 2))
    return ParallelModel(mesh, lowered, stages, facts, owner, loss, norm_over, serial, seed, **more)


def _check_mesh(mesh: Mesh, layout: Layout) -> None:
    if dict(mesh.shape.sizes) != layout.sizes or [*mesh.shape.axes] != [*layout.sizes]:
        raise ValueError(f"the layout needs a mesh of {MeshShape(**layout.sizes)}, but got {mesh.shape}")


def _check_mixtures(model: nn.Module, layout: Layout) -> None:
    """Check, before anything is changed, that these ranks can share and slice the experts of a model."""
    mixtures = [module for module in model.modules() if isinstance(module, MoE)]
    for options in [mixture.options for mixture in mixtures] or [ExpertOptions()]:
        layout.check_experts(options)
    for mixture in mixtures:
        if isinstance(mixture.experts, Experts) and (width := mixture.experts.down.shape[2]) % layout.tp:
            raise ValueError(f"d_expert={width} cannot be split over tp={layout.tp}; use a multiple of {layout.tp}")
    if layout.dp * layout.cp * layout.microbatches > 1:
        check_expert_rows(model)


def _check(model: nn.Module, layout: Layout, optimizer: MakeOptimizer, dtype: torch.dtype | None) -> None:
    """Check, before anything is changed, that model, layout, optimizer and dtype fit together."""
    if dtype is not None and not layout.zero:
        raise ValueError("dtype needs master weights, which plain data parallelism does not keep; use zero=1")
    precise = kept_precise(model)
    frozen = [p for p in model.parameters() if not p.requires_grad and id(p) not in precise]
    if dtype is not None and layout.zero < 3 and frozen:
        raise ValueError("dtype is for parameters that are trained, and some are frozen: omit dtype, or use zero=3")
    tie([model])  # refuses parameters that share memory
    check_rows(model, layout.dp * layout.microbatches)
    if layout.tp > 1:  # shards will be new tensors
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        check_groups(optimizer, trained, are_flat=layout.zero > 0)
    if dtype is not None:
        check_range(dtype)


def _check_shards(model: nn.Module, serial: Mapping[str, tuple[str, torch.Size]], tp: Group) -> None:
    """Check that a sharded model has the names of the full model, and shards that make up its parameters."""
    now, full, experts = parts(model), dict(serial.values()), with_experts(model)
    if missing := [name for name in full if name not in now]:
        raise ValueError(
            f"{missing[0]} is missing after shard=: put each parallel layer in the place of its layer, so that its "
            "parameters keep their names, on which checkpoints depend"
        )
    for key, (first, _) in serial.items():
        if key in now and now[key][0] is not now[first][0]:
            raise ValueError(
                f"{key} was tied to {first}, and shard= made two parameters of them, which would drift apart: tie them "
                f"again at its end, model.{key} = model.{first}"
            )
    for name, shape in full.items():
        p, placement = now[name]
        mine = of_experts(torch.empty(shape, device="meta"), experts.get(id(p), Group()))
        right = shard_of(mine, placement, tp).shape
        if p.shape != right:
            raise ValueError(
                f"{name} has shape {list(p.shape)} after shard=, and {list(shape)} before: with its placement, "
                f"{placement}, it would be {list(right)}; its layer says in `placements` how it is sharded"
            )


def _check_stages(model: nn.Module, modules: Sequence[nn.Module], num_stages: int) -> None:
    """Check that the modules of the stages have all parameters of the model, and no others."""
    if len(modules) != num_stages:
        raise ValueError(f"cut= returned {len(modules)} modules, and this layout has {num_stages} stages")
    names = {id(p): name for name, p in model.named_parameters()}
    inside = {id(p): f"{name} of stage {s}" for s, m in enumerate(modules) for name, p in m.named_parameters()}
    if missing := [name for key, name in names.items() if key not in inside]:
        raise ValueError(
            f"{missing[0]} is in no stage, so it would not be trained: cut= must return all layers of the model"
        )
    if foreign := [name for key, name in inside.items() if key not in names]:
        raise ValueError(f"{foreign[0]} is no parameter of the model: cut= must return its layers, and not copies")
