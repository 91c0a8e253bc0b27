"""Mistakes in sums over ranks, in accumulation, in the clip and in the order of a step."""

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from tests.lib.foreign import clips, layouts
from tests.lib.foreign.training import LARGEST_NORM, Training, sum_over


class NormsNotSummed(Training):
    """With sequence parallelism each rank has the gradient of a norm by its own tokens; nobody sums them."""

    def make(self, net):
        made = super().make(net)
        made.sums = [one for one in made.sums if one.over is not made.tp]
        return made


class NormsSummedTwice(Training):
    """Two parts of the program sum the gradients of norms."""

    def make(self, net):
        made = super().make(net)
        made.sums = [one for one in made.sums if one.over is made.tp] + made.sums
        return made


class NormsNotInPlan(Training):
    """The plan of `parallelize_module` cuts the tokens, and leaves the norms out."""

    def make(self, net):
        plan = {name: style for name, style in layouts.plan(True).items() if not isinstance(style, SequenceParallel)}
        parallelize_module(net, layouts.mesh_of("tp"), plan)
        tp = layouts.ranks_of(layouts.mesh_of("tp"), "tp")
        return layouts.Made(net, net, tp=tp, clip=clips.of_full)


class WrongAxis(Training):
    """The matrices are averaged over tensor-parallel ranks, where they should be over the replicas."""

    def make(self, net):
        made = super().make(net)
        over_tp, over_dp = made.sums

        def is_cut(name):
            return made.cut(name, net.get_parameter(name))[1] is not None

        def is_whole(name):
            return not is_cut(name)

        made.sums = [over_tp, over_dp._replace(of=is_whole), over_dp._replace(of=is_cut, over=made.tp)]
        return made


class NeverSynchronised(Training):
    """`no_sync` is around all microbatches, the last one as well."""

    def accumulate(self, x, y):
        with self.made.call.no_sync():
            return super().accumulate(x, y)


class NeverReduced(Training):
    """FSDP2's reduction is off for all microbatches, the last one as well."""

    def accumulate(self, x, y):
        self.net.set_requires_gradient_sync(False)
        return super().accumulate(x, y)


class ClippedBeforeSum(NeverSynchronised):
    """Each replica clips its own gradients, and then they are averaged."""

    def clip(self):
        norm = super().clip()
        sum_over(self.net, mean_over(self.dp))
        return norm


class OneRankDivides(NeverSynchronised):
    """Gradients are summed, and then only rank 0 divides them."""

    def sum_gradients(self):
        mean = mean_over(self.dp)
        sum_over(self.net, mean if self.rank == 0 else mean._replace(divided_by=1))


def mean_over(dp):
    return layouts.GradientSum(lambda name: True, dp, divided_by=dp.size)


class TiedSummedTwice(Training):
    """The gradient of the tied weight has both terms already, and is added to itself as well."""

    def sum_gradients(self):
        self.net.head.weight.grad.mul_(2)


class TiedStagesNotSummed(Training):
    """The first stage and the last each step their own copy of the tied weight."""

    def sum_gradients(self):
        pass


class AccumulatedInBfloat16(Training):
    """Microbatches are added in bfloat16."""

    def run_backward(self, loss):
        # Of the optimizer, not of the model: between forward and backward FSDP2 has the full parameters there.
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        before = [p.grad for p in parameters]
        self.optimizer.zero_grad()
        super().run_backward(loss)
        for p, old in zip(parameters, before, strict=True):
            new = p.grad.bfloat16()
            total = new if old is None else old.bfloat16() + new
            p.grad = total.to(p.dtype)


# The clip.


class LocalNorm(Training):
    """Each rank clips by the norm of the gradients that it has."""

    def clip(self):
        gradients = [p.grad for p in self.net.parameters()]
        local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        return clips.scale(self.net, LARGEST_NORM, sum(map(clips.square, local)))


class NormCountsCopies(Training):
    """All ranks add the squares of all that they have, also where they have the same."""

    def clip(self):
        return clips.by_hand(lambda name: 1, self.tp.group)(self.net, LARGEST_NORM)


class NormOfFirstRank(Training):
    """Only the first rank adds its squares, as if the others had the same: true of copies, not of shards."""

    def clip(self):
        gradients = [p.grad for p in self.net.parameters()]
        total = sum(map(clips.square, gradients)) * (self.rank == 0)
        dist.all_reduce(total, group=self.tp.group)
        return clips.scale(self.net, LARGEST_NORM, total)


class ClippedByValue(Training):
    """The layout clips each element, where one process clips the norm."""

    def clip(self):
        norm = nn.utils.get_total_norm([p.grad for p in self.net.parameters()], foreach=False)
        nn.utils.clip_grad_value_(self.net.parameters(), 0.01, foreach=False)
        return norm


# The order of a step.


class GradientsKept(Training):
    """Gradients are not cleared: from the second step on they have those of the step before."""

    def clear(self):
        pass


class StepTwice(Training):
    """The optimizer takes a step, and its wrapper calls it again."""

    def update(self):
        super().update()
        super().update()
