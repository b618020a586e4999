"""Ranks that ``torchrun`` starts, and how they share a model.

One process trains as it is. Several form a process group (gloo on CPUs, NCCL on GPUs): with ``ddp``
every rank holds the whole model and gradients are averaged; with ``fsdp`` (PyTorch's
``fully_shard``) every rank holds a part of each parameter, its gradient and its optimiser state,
and blocks are put together for as long as they compute. Parameters, their gathering and the
averaging are float32; products are in the training's dtype, as without ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree

from yocolm.errors import ConfigError
from yocolm.models.dense import DenseKV
from yocolm.train.objective import Objective
from yocolm.train.settings import TrainSettings

PATIENCE = timedelta(days=7)  # while one rank reads and tokenises the texts
PARTS = ("write", "read")  # of a block, called apart from its forward

Result = TypeVar("Result")


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together; alone by default.

    Words and counts go between the hosts by ``control``, whatever the devices are.
    """

    rank: int = 0
    size: int = 1
    local: int = 0  # on its machine: the number of its GPU
    control: Any = None

    @property
    def main(self) -> bool:
        """Whether this is the rank that prints, and writes what only one may write."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, the same on each of them."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.control)
        return total.tolist()

    def from_main(self, value: Result) -> Result:
        """Rank 0's value, on every rank."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        self.sum([0.0])

    @contextmanager
    def together(self) -> Iterator[None]:
        """A part in which an error of one rank ends all of them; nothing in it may wait for others.

        The first rank with an error raises it, and any rank whose error is another one; the others
        end without a word.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:  # whatever it is: the others would wait for this rank
            error = raised
        messages: list[str | None] = [None if error is None else str(error)]
        if self.size > 1:
            messages = [None] * self.size
            said = None if error is None else str(error)
            dist.all_gather_object(messages, said, group=self.control)
        first = next((rank for rank, text in enumerate(messages) if text is not None), None)
        if first is None:
            return
        if error is not None and (first == self.rank or str(error) != messages[first]):
            raise error
        raise SystemExit(1)

    def main_first(self, work: Callable[[], Result]) -> Result:
        """``work()`` on rank 0, and then on the others: what it writes to disk is there for them.

        An error on any rank ends all of them.
        """
        done: list[Result] = []
        for turn in (self.main, not self.main):
            with self.together():
                if turn:
                    done.append(work())
        return done[0]


@contextmanager
def join_ranks(device: str) -> Iterator[Ranks]:
    """The ranks of ``torchrun``, or this process alone if it was started without.

    ``device`` is the setting ``train.device``. The process group ends with the context.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
        yield Ranks()
        return
    if device == "cpu" or not torch.cuda.is_available():
        dist.init_process_group("gloo")
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        dist.init_process_group("cpu:gloo,cuda:nccl")
    try:
        yield current_ranks()
    except KeyboardInterrupt:  # which all ranks agreed on; after other errors some may hang
        dist.destroy_process_group()
        raise
    dist.barrier()  # none leaves while another still talks to it
    dist.destroy_process_group()


def current_ranks() -> Ranks:
    """The ranks of the process group that there is; this process alone without one."""
    if not dist.is_initialized():
        return Ranks()
    rank, size = dist.get_rank(), dist.get_world_size()
    local = int(os.environ.get("LOCAL_RANK", rank))
    return Ranks(rank, size, local, _control_group(dist.group.WORLD))


@lru_cache(maxsize=1)
def _control_group(world: Any) -> Any:
    return dist.new_group(backend="gloo", timeout=PATIENCE)


def micro_batches(s: TrainSettings, ranks: Ranks) -> list[int]:
    """Windows of each micro-batch of one rank; a step's windows are shared out evenly.

    Raises ConfigError if they cannot be.
    """
    o = s.train
    total = o.batch_size * o.accumulate
    if total % ranks.size:
        raise ConfigError(
            f"train.batch_size * train.accumulate is {total} windows a step, which {ranks.size} "
            f"ranks cannot share evenly; make it a multiple of {ranks.size}"
        )
    own = total // ranks.size
    count = -(-own // o.batch_size)
    return [own // count + (i < own % count) for i in range(count)]


def strategy_of(s: TrainSettings, ranks: Ranks) -> str:
    """``single``, ``ddp`` or ``fsdp``. Raises ConfigError for what cannot be sharded."""
    if ranks.size == 1:
        return "single"
    shard_size = s.parallel.shard_size
    if s.parallel.strategy != "fsdp":
        if shard_size is not None:
            raise ConfigError(
                f"parallel.shard_size is {shard_size}, but parallel.strategy "
                f"{s.parallel.strategy!r} shards nothing; set it to fsdp, or leave shard_size out"
            )
        return "ddp"
    if shard_size is not None and ranks.size % shard_size:
        raise ConfigError(
            f"parallel.shard_size is {shard_size}; it must divide the number of ranks, {ranks.size}"
        )
    if s.train.optimizer == "muon":
        raise ConfigError(
            "train.optimizer is 'muon', which needs whole matrices; under parallel.strategy "
            "'fsdp' no rank has them: set ddp, or adamw"
        )
    return "fsdp"


def distribute(
    objective: Objective, s: TrainSettings, ranks: Ranks, device: torch.device
) -> nn.Module:
    """The objective as the ranks share it: call it where ``objective`` would be called.

    Its model moves to ``device``; under ``fsdp`` its parameters become DTensors. To be called
    before the optimisers are built.
    """
    strategy = strategy_of(s, ranks)
    if strategy == "fsdp":
        return _shard(objective, s, ranks, device)
    objective.to(device)
    if strategy == "single":
        return objective
    devices = [device] if device.type == "cuda" else None
    shared = DistributedDataParallel(objective, device_ids=devices, gradient_as_bucket_view=True)
    _settle_buckets(shared, device)
    return shared


def _settle_buckets(shared: DistributedDataParallel, device: torch.device) -> None:
    """Have gradients put into their final buckets before the first step.

    DDP orders its buckets anew after the first backward pass. Sums of three and more ranks depend
    on the place in a bucket: a resumed run would repeat its first step in another rounding.
    """
    tokens = torch.zeros(2, dtype=torch.int64, device=device)
    for _ in range(2):
        shared(tokens, tokens, [2]).backward()
        shared.zero_grad(set_to_none=True)


def _shard(objective: Objective, s: TrainSettings, ranks: Ranks, device: torch.device) -> nn.Module:
    """Shard every block by itself, and all else (tied weights too) with the objective.

    The halves of a block that are called apart gather its parameters as its forward does. Nothing
    is cast on the way in: RoPE tables and decays stay float32.
    """
    _register_handles()
    size = ranks.size if s.parallel.shard_size is None else s.parallel.shard_size
    if size == ranks.size:
        mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    else:
        shape = (ranks.size // size, size)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in _blocks(objective.model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
        for part in PARTS:
            if hasattr(block, part):
                register_fsdp_forward_method(block, part)
    fully_shard(objective, mesh=mesh, mp_policy=policy)
    return objective


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The layers."""
    for part in model.children():
        if isinstance(part, nn.ModuleList):
            yield from part


@lru_cache(maxsize=1)
def _register_handles() -> None:
    """Let FSDP find the tensors of the handles that blocks give and take."""

    def rebuild(tensors: Any, context: Any) -> DenseKV:
        (k, v), (written, window) = tensors, context
        return DenseKV(k, v, written, window)

    _pytree.register_pytree_node(
        DenseKV, lambda kv: ([kv.k, kv.v], (kv.written, kv.window)), rebuild
    )


def accumulating(shared: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Around all but the last backward pass of a step: gradients need no averaging yet.

    Under ``fsdp`` they are averaged every time, or each rank would have to keep them whole.
    """
    if isinstance(shared, DistributedDataParallel) and not last:
        return shared.no_sync()
    return nullcontext()


def release(shared: nn.Module) -> None:
    """After a forward pass without a backward one: let no rank keep parameters that it gathered."""
    if isinstance(shared, FSDPModule):
        shared.reshard()


def whole(tensor: Tensor) -> Tensor:
    """All of a parameter or norm that may be spread over ranks; every rank has to ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
