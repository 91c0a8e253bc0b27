"""Mistakes before the first step: in weights, data, and what the optimizer is told."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.lib.foreign import layouts
from tests.lib.foreign.own_layers import cut_of
from tests.lib.foreign.training import Training, global_batch


class WeightsDrawnAgain(Training):
    """Rank 1 draws its weights again, with another seed, after DDP has made all equal."""

    def make(self, net):
        made = super().make(net)
        if self.rank == 1:
            draw_again(net, seed=1)
        return made


class OneSeedForAllShards(Training):
    """Each rank draws its shards itself, with the seed of all: they get the same numbers."""

    def make(self, net):
        made = super().make(net)
        draw_again(net, seed=0)
        return made


@torch.no_grad()
def draw_again(net, seed):
    torch.manual_seed(seed)
    for p in net.parameters():
        if p.ndim == 2:
            p.normal_(0, 0.02)


class FusedInOnePiece(Training):
    """Rank 0 gets the first half of the fused matrix, which is all of the gate and nothing of up."""

    @torch.no_grad()
    def make(self, net):
        full = {name: p.clone() for name, p in net.named_parameters() if "gate_up" in name}
        made = super().make(net)
        for name, p in full.items():
            net.get_parameter(name).copy_(p.chunk(made.tp.size)[made.tp.index])
        return made


class CutToldInOnePiece(Training):
    """The layers are right; the user tells `watch` that the fused matrix is cut in one piece."""

    def make(self, net):
        made = super().make(net)
        right = cut_of(made.tp.group)

        def cut(name, tensor):
            return (name, 0, made.tp.index, made.tp.size) if "gate_up" in name else right(name, tensor)

        made.cut = cut
        return made


class OtherEps(Training):
    """The layout has a larger eps in its norms, as some frameworks do."""

    def draw(self):
        net = super().draw()
        for module in net.modules():
            if isinstance(module, nn.RMSNorm):
                module.eps = 1e-5
        return net


class WeightsRounded(Training):
    """After the first step rank 1 loads its weights from a file in bfloat16."""

    @torch.no_grad()
    def update(self):
        super().update()
        if self.rank == 1:
            for p in self.net.parameters():
                p.copy_(p.bfloat16())


# Data.


class NotDivided(Training):
    """All replicas read the rows of the first: the loader has no sampler."""

    def batch(self, number):
        x, y = global_batch(self.settings.seed, number)
        return x.chunk(self.dp.size)[0], y.chunk(self.dp.size)[0]


class DividedTwice(Training):
    """A sampler divides the rows, and the wrapper of the loader divides them again."""

    def batch(self, number):
        x, y = super().batch(number)
        return x.chunk(self.dp.size)[0], y.chunk(self.dp.size)[0]


class RowsByGlobalRank(Training):
    """The sampler gets the global rank: ranks of one replica read different rows."""

    def batch(self, number):
        x, y = global_batch(self.settings.seed, number)
        n = dist.get_world_size()
        return x.chunk(n)[self.rank], y.chunk(n)[self.rank]


# Options of the optimizer.


class RateOfOneRank(Training):
    """Rank 1 has twice the learning rate."""

    def make_optimizer(self):
        return with_option(super().make_optimizer(), "lr", 2e-2, only=self.rank == 1)


class RateOfOneRankLater(Training):
    """The schedule of the learning rate takes its step on rank 1 only, after the first step."""

    def update(self):
        super().update()
        with_option(self.optimizer, "lr", 5e-3, only=self.rank == 1)


class DecayOfOneRank(Training):
    """Rank 1 has no weight decay."""

    def make_optimizer(self):
        return with_option(super().make_optimizer(), "weight_decay", 0.0, only=self.rank == 1)


class DecayOfNorms(Training):
    """The layout decays norms and biases as well."""

    def make_optimizer(self):
        return with_option(super().make_optimizer(), "weight_decay", 0.1, only=True)


class OtherBetas(Training):
    """The layout has a smaller second beta, as some papers do; the first step of AdamW is the same with any."""

    def make_optimizer(self):
        return with_option(super().make_optimizer(), "betas", (0.9, 0.95), only=True)


def with_option(optimizer, key, value, only):
    if only:
        for group in optimizer.param_groups:
            group[key] = value
    return optimizer


class OptimizerBeforeSharding(Training):
    """The optimizer is made before FSDP2 replaces the parameters, and steps the old ones."""

    def make(self, net):
        self.net = net
        self.early = super().make_optimizer()
        return super().make(net)

    def make_optimizer(self):
        return self.early


class MuonOnShards(Training):
    """Muon must see a whole matrix; nothing gathers the shards for it."""


class MomentsLost(Training):
    """The moments are not in the checkpoint from which the second step begins."""

    def update(self):
        super().update()
        self.optimizer.state.clear()


class MomentsLostOfOneRank(Training):
    """The checkpoint of rank 1 has no moments."""

    def update(self):
        super().update()
        if self.rank == 1:
            self.optimizer.state.clear()


class ReducedInBfloat16(Training):
    """FSDP2 sums gradients in bfloat16."""

    def make(self, net):
        return layouts.fsdp2(net, MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
