"""Gradients of data parallelism, exchanged in fewer bytes. Lossy: no step equals that of plain training.

bf16, fp16 and PowerSGD are torch's own communication hooks, top-k and int8 are in files of their own. What is owed
(error feedback) is part of the training state: each rank writes its own beside the checkpoint's other files, with
PowerSGD's factors, random state and iteration, and goes on from it with the same bits.

Invariant. All ranks get the same bits of every mean. Top-k and int8 depend on no bucket; PowerSGD keeps its state by
bucket, so a bucket with other parameters than before ends the run. (Torch forms buckets anew after the first step
unless it looks for unused parameters, which Hugging Face's Trainer asks for, but not with gradient checkpointing.)

Who asks for an exchange: DistributedDataParallel by a hook, or the memory engine by ``means``, also where its ranks
hold spans. Top-k and int8 give both the same bits. With the engine what is owed rests on the host, and visits the
device of the gradients.

Collectives of several buckets, and those that torch makes of its own, may be under way at once, so exchanges have a
group of their own, and one thread (``ddp_hook.py``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from deepstow.strategies.engine.optimizer import StowOptimizer
from deepstow.strategies.plugins.codec_int8 import Int8
from deepstow.strategies.plugins.codec_topk import TopK
from deepstow.strategies.plugins.ddp_hook import Hook
from deepstow.strategies.state.spans import Span, write

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from deepstow.strategies.core.facts import Compression

CASTS = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}
SENT = {"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EPSILON = 1e-8  # so that a gradient of zeros has no norm of zero to be divided by
KINDS = ("owed", "owed as owner", "momentum")  # of the others' state, of each parameter
BY_BUCKET = {"error": "error_dict", "p": "p_memory_dict", "q": "q_memory_dict"}  # of PowerSGD's state


def codec_of(how: Compression, trained: Iterable[tuple[str, Tensor]], group: Any) -> Any:
    """What codes, and keeps what is owed of, the ``trained`` parameters."""
    if how.method == "powersgd":
        return PowerSGDState(group, how.rank, start_powerSGD_iter=how.start, orthogonalization_epsilon=EPSILON)
    if how.method == "topk":
        return TopK(trained, how.density, how.momentum, group)
    return Int8(trained, group) if how.owes else None


def average(tensors: Sequence[Tensor], sent: torch.dtype, group: Any) -> None:
    """``tensors`` become their means over ranks, added in the dtype in which they are sent."""
    flat = torch.cat([tensor.flatten() for tensor in tensors]).to(sent)
    dist.all_reduce(flat.div_(group.size()), group=group)
    for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(mean.view_as(tensor))


class _Bucket:
    """Gradients of a bucket of the engine, in fp32, as torch's hooks are given a bucket."""

    def __init__(self, index: int, gradients: Sequence[Tensor]) -> None:
        self._flat = torch.cat([grad.flatten().float() for grad in gradients])
        parts = self._flat.split([grad.numel() for grad in gradients])
        self._index, self._parts = index, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)]

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        """Whether the exchange comes last of a step, which is counted elsewhere."""
        return False

    def buffer(self) -> Tensor:
        return self._flat

    def gradients(self) -> list[Tensor]:
        return self._parts


class Compressed:
    """How the ranks of the default group exchange; a collective."""

    afresh = "nothing is owed"  # after a change of options

    def __init__(self, compression: Compression) -> None:
        self.compression = compression
        self._group: Any = dist.new_group()
        self._codec: Any = None
        self._steps = 0
        self._names = dict[int, str]()
        self._buckets = dict[int, list[str]]()

    def hang_on(self, model: DistributedDataParallel) -> None:
        """Exchange what ``model`` trains from now on."""
        how, group = self.compression, self._group
        trained = [(name, param) for name, param in model.module.named_parameters() if param.requires_grad]
        self._names = {id(param): name for name, param in trained}
        self._device = trained[0][1].device
        self._codec = codec_of(how, trained, group)
        Hook(self._exchange).hang_on(model)

    def follow(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Make steps of the ``optimizer`` of ``model`` in the method's way; a collective."""
        if isinstance(optimizer, StowOptimizer):
            named = model.named_parameters()
            sizes = [(name, torch.empty(()).expand(param.shape)) for name, param in named if param.requires_grad]
            self._codec, self._device = codec_of(self.compression, sizes, self._group), torch.device("cpu")
            optimizer.engine.ranks.exchange = self
            optimizer.register_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self._steps += 1

    @torch.no_grad()
    def means(self, bucket: int, names: Sequence[str], gradients: Sequence[Tensor]) -> bool:
        """For the memory engine (``Exchange`` in ``engine/ranks/replicas.py``); a collective."""
        codec, device = self._codec, gradients[0].device
        if codec is None:
            average(gradients, SENT[self.compression.method], self._group)
        elif self._steps < self.compression.start:
            if not self.compression.momentum:
                return False
            average(gradients, torch.float32, self._group)
            with _visiting(codec.state, _keys(names), device):
                codec.follow(names, gradients)
        elif isinstance(codec, PowerSGDState):
            self._refuse_other(bucket, names)
            visitor: Any = _Bucket(bucket, gradients)  # has all that the hook asks of a bucket
            codec.iter = self._steps
            with ExitStack() as stack:
                for name in BY_BUCKET.values():
                    stack.enter_context(_visiting(getattr(codec, name), [bucket], device))
                powerSGD_hook(codec, visitor).wait()
            torch._foreach_copy_(list(gradients), visitor.gradients())
        else:
            with _visiting(codec.state, _keys(names), device):
                codec.exchange(names, gradients)
        return True

    def norm_of_all(self, norm: Tensor) -> Tensor:
        """``norm``, which all ranks have."""
        return norm

    def outer_weights(self) -> AbstractContextManager[None]:
        """Within it the model is what it is to others."""
        return nullcontext()

    def finish(self) -> str:
        """After the last step: leave the model as it is to others; what is not in it, if anything is."""
        return ""

    def _exchange(self, bucket: dist.GradBucket) -> Tensor:  # type: ignore[name-defined]
        flat: Tensor = bucket.buffer()
        names = [self._names[id(param)] for param in bucket.parameters()]
        if self._codec is None:
            return CASTS[self.compression.method](self._group, bucket).wait()
        if isinstance(self._codec, PowerSGDState):
            self._refuse_other(bucket.index(), names)
            return powerSGD_hook(self._codec, bucket).wait()
        if self._steps < self.compression.start:
            dist.all_reduce(flat.div_(self._group.size()), group=self._group)
            if self.compression.momentum:
                self._codec.follow(names, bucket.gradients())
        else:
            self._codec.exchange(names, bucket.gradients())
        self._steps += bucket.is_last()
        return flat

    def _refuse_other(self, bucket: int, names: Sequence[str]) -> None:
        if (former := self._buckets.setdefault(bucket, list(names))) != list(names):
            mismatch = f"{len(names)} gradients from {names[0]} on, and has had {len(former)} from {former[0]} on"
            raise RuntimeError(f"bucket {bucket} has {mismatch}: what is owed does not fit")

    # --- what is owed, in checkpoints ---------------------------------------------------------------------------------

    def save(self, folder: Path, rank: int) -> None:
        """Write this rank's state into ``folder``; between steps. Raise OSError if that cannot be done."""
        if not self._keeps:
            return
        numbers: dict[str, Any] = {"steps": self._steps, "buckets": self._buckets}
        if isinstance(self._codec, PowerSGDState):
            kind, keys, *position = self._codec.rng.get_state()
            numbers |= {"steps": self._codec.iter, "random": [kind, np.asarray(keys).tolist(), *position]}
        about = {"of": self.compression.words, "numbers": json.dumps(numbers)}
        parts = [(*name.rpartition("."), tensor) for name, tensor in self._state()]
        spans = [Span(name, kind, tuple(tensor.shape), 0, tensor) for name, _, kind, tensor in parts]
        write(_path(folder, rank, self._group.size()), spans, hashed=False, about=about)

    def load(self, folder: Path, rank: int) -> str:
        """Go on with what this rank owes; why it owes nothing instead, if that is not what ``folder`` has. Raise
        ValueError, before anything is changed, if a file is damaged.
        """
        if not self._keeps:
            return ""
        path = _path(folder, rank, self._group.size())
        if not path.is_file():
            return f"{folder.name} has no state of compressed exchanges of {self._group.size()} ranks: {self.afresh}"
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                if about["of"] != self.compression.words:
                    return f"{folder.name} was saved with {about['of']}: {self.afresh}"
                numbers, names = json.loads(about["numbers"]), list(file.keys())
            self._fill(_Read(path, names), numbers)
        except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError):
            raise ValueError(f"{path}: damaged, or of another model") from None
        return ""

    def resumed(self) -> None:
        """Weights and optimizer are those of a checkpoint from now on."""

    @property
    def _keeps(self) -> bool:
        return self.compression.owes or self.compression.local_steps > 0

    def _fill(self, tensors: Mapping[str, Tensor], numbers: dict[str, Any]) -> None:
        steps, buckets = int(numbers["steps"]), {int(key): list(names) for key, names in numbers["buckets"].items()}
        codec = self._codec
        if isinstance(codec, PowerSGDState):
            kind, keys, *position = numbers["random"]
            codec.rng.set_state((kind, np.array(keys, np.uint32), *position))
            for name, tensor in tensors.items():
                label, _, index = name.partition(".")
                getattr(codec, BY_BUCKET[label])[int(index)] = tensor.to(self._device)
            codec.iter = steps
        else:
            if {name: owed.shape for name, owed in tensors.items()} != {
                n: owed.shape for n, owed in codec.state.items()
            }:
                raise ValueError
            for name, tensor in tensors.items():
                codec.state[name].copy_(tensor)
        self._steps = steps
        self._buckets = buckets

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        if not isinstance(self._codec, PowerSGDState):
            yield from self._codec.state.items()
            return
        for label, name in BY_BUCKET.items():
            for index, tensor in getattr(self._codec, name).items():
                yield f"{label}.{index}", tensor


def _keys(names: Iterable[str]) -> list[str]:
    """Of the state of the parameters ``names``."""
    return [f"{name}.{kind}" for name in names for kind in KINDS]


@contextmanager
def _visiting(state: dict[Any, Tensor], keys: Iterable[Any], device: torch.device) -> Iterator[None]:
    """This part of what is owed is on ``device`` meanwhile; otherwise it rests on the host."""
    homes = {key: state[key] for key in keys if key in state}
    state.update({key: home.to(device) for key, home in homes.items()})
    yield
    for key in keys:
        if key in homes:
            state[key] = homes[key].copy_(state[key])
        elif key in state:  # for the first time
            state[key] = state[key].cpu()


class _Read(Mapping[str, Tensor]):
    """The tensors of a file, each read where it is asked for: all of them would take as much memory again."""

    def __init__(self, path: Path, names: list[str]) -> None:
        self._path = path
        self._names = names

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._path, "pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _path(folder: Path, rank: int, ranks: int) -> Path:
    return folder / f"compressed-{rank:05}-of-{ranks:05}.safetensors"
