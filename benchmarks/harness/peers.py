"""Peers, each at the best settings we know for one device per rank and this work; the settings go into the record.

A peer that cannot do the same work says so in ``notes``. One that cannot run here raises Unavailable, and the table
shows why.
"""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from deepstow.benchmarks.harness.contenders import Batch, Trained, Unavailable
from deepstow.benchmarks.harness.work import Work
from deepstow.trainer.distributed.ranks import Ranks, process_group

TIMEOUT_S = 600
SMALLEST_BUCKET = 50_000_000  # elements; DeepSpeed's guides use no smaller ones
SUPER_BUCKET = 400_000_000  # elements, as in SuperOffload's examples


class DeepSpeed(Trained):
    """ZeRO-2 with the optimizer on the host, or ZeRO-3 with the parameters there too; DeepSpeed's CPU Adam. With
    ``infinity`` its state is in files in ``work.disk``, which its asynchronous I/O reads and writes.
    """

    def __init__(
        self,
        work: Work,
        model: nn.Module,
        device: torch.device,
        *,
        stage: int,
        super_offload: bool = False,
        ratio: float = 0.9,
        infinity: bool = False,
    ) -> None:
        super().__init__(work, device)
        if super_offload and device.type != "cuda":
            raise Unavailable("needs a CUDA GPU")
        if infinity:
            self._refuse_without_disk()
        self.group = ExitStack()
        if work.ranks == 1:
            self.group.enter_context(process_group(Ranks(), TIMEOUT_S, single=True))
        import deepspeed
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        self.settings = config = self.config(stage, super_offload=super_offload, ratio=ratio, infinity=infinity)
        if stage == 3:
            # partitioned at once, never whole on the device
            deepspeed.zero.Init(module=model, config_dict_or_path=config)
        optimizer = DeepSpeedCPUAdam(model.parameters(), adamw_mode=True, **work.adamw)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self.model = self.engine

    def _refuse_without_disk(self) -> None:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        if not self.work.disk:
            raise Unavailable("needs --disk")
        if not AsyncIOBuilder().is_compatible(verbose=False):
            raise Unavailable("its asynchronous I/O needs libaio: apt-get install libaio-dev")

    def config(self, stage: int, *, super_offload: bool, ratio: float, infinity: bool) -> dict[str, Any]:
        """Pinned memory, overlapped copies, and buckets of at least a block, so that a block takes few copies.

        SuperOffload as in its authors' examples: weights and all but ``ratio`` of the updates stay on the device.
        ZeRO-Infinity reads and writes while it updates, a block at a time, with as many buffers as that takes; not
        tuned further.
        """
        block = self.work.shape.block_params
        bucket = max(SMALLEST_BUCKET, block)
        host = {"device": "cpu", "pin_memory": True}
        zero: dict[str, Any] = {"stage": stage, "offload_optimizer": host, "contiguous_gradients": True}
        zero |= {"overlap_comm": True, "reduce_bucket_size": bucket}
        if super_offload:
            host |= {"super_offload": True, "ratio": ratio, "cpuadam_cores_perc": 0.9}
            zero |= {"overlap_comm": False, "reduce_bucket_size": SUPER_BUCKET, "sub_group_size": SUPER_BUCKET}
        elif stage == 2:
            zero |= {"allgather_bucket_size": bucket}
        else:
            zero |= {"offload_param": host, "stage3_prefetch_bucket_size": bucket}
        disk_options: dict[str, Any] = {}
        if infinity:
            files = {"device": "nvme", "nvme_path": self.work.disk, "buffer_count": 12}
            zero |= {"offload_optimizer": host | files | {"pipeline_read": True, "pipeline_write": True}}
            zero |= {"sub_group_size": block}  # updated at a time
            disk_options = {
                "aio": {"block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 1, "overlap_events": True}
            }
        return disk_options | {
            "train_micro_batch_size_per_gpu": self.work.rows,
            "gradient_accumulation_steps": self.work.accumulation,
            "gradient_clipping": self.work.max_grad_norm,
            "bf16": {"enabled": self.work.dtype == "bf16"},
            "zero_optimization": zero,
            "steps_per_print": 1 << 60,
        }

    def micro_batch(self, batch: Batch) -> Tensor:
        """DeepSpeed counts micro-batches: it divides the loss, and updates at the last one."""
        loss: Tensor = self.engine(**batch).loss
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def update(self) -> None:
        """The last micro-batch has updated already."""

    def discard(self, batch: Batch) -> None:
        """DeepSpeed cannot discard gradients, so complete the micro-batches of the update that has begun."""
        while self.engine.micro_steps % self.work.accumulation:
            self.micro_batch(batch)

    def close(self) -> None:
        """Destroy the engine before the process group that it uses."""
        self.engine.destroy()
        del self.engine, self.model
        self.group.close()


class Fsdp2(Trained):
    """``fully_shard`` per block with ``CPUOffloadPolicy``: weights, gradients and moments in fp32 on the host."""

    def __init__(self, work: Work, model: Any, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        super().__init__(work, device)
        accelerated = device.type != "cpu"
        distributed: Any = torch.distributed
        backend = "gloo"
        if accelerated:  # gradients on the host need gloo for their norm
            backend = f"cpu:gloo,{device.type}:{distributed.get_default_backend_for_device(device)}"
        if work.ranks == 1:
            distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
        elif accelerated:
            raise Unavailable("over ranks of an accelerator its group is not opened here")
        mesh = init_device_mesh(device.type, (work.ranks,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if work.dtype == "bf16" else MixedPrecisionPolicy()
        offload = CPUOffloadPolicy(pin_memory=accelerated)
        shared: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
        model.float()  # the shards are the masters
        for block in model.model.layers:
            fully_shard(block, **shared)
        self.model = fully_shard(model, **shared)
        for buffer in model.buffers():
            buffer.data = buffer.to(device)
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True, **work.adamw)
        policies = {"offload_policy": str(offload), "mp_policy": str(policy)}
        self.settings = {"backend": backend, **policies, "optimizer": "torch.optim.AdamW(fused=True) on the host"}
        if not accelerated:
            self.notes = ("pin_memory=False: FSDP2 refuses to pin without an accelerator (its default is True)",)

    def close(self) -> None:
        if self.work.ranks == 1:
            torch.distributed.destroy_process_group()


class TorchAo(Trained):
    """torchao's CPUOffloadOptimizer: weights on the device, one torch AdamW per parameter on the host."""

    def __init__(self, work: Work, model: nn.Module, device: torch.device) -> None:
        if importlib.util.find_spec("torchao") is None:
            raise Unavailable("not installed")
        if device.type not in ("cuda", "xpu"):
            raise Unavailable("it only supports CUDA and XPU")
        from torchao.optim import CPUOffloadOptimizer

        super().__init__(work, device)
        self.model = model.float().to(device)  # it updates a copy of this dtype on the host
        offload_gradients = work.accumulation == 1  # it refuses this with accumulation
        self.optimizer = CPUOffloadOptimizer(
            self.model.parameters(), torch.optim.AdamW, offload_gradients=offload_gradients, fused=True, **work.adamw
        )
        self.settings = {"offload_gradients": offload_gradients, "optimizer": "torch.optim.AdamW(fused=True)"}
        self.notes = ("does not clip: gradients are copied to the host before their norm is known",)
        if work.dtype == "bf16":
            self.notes += ("fp32 weights under bf16 autocast: it keeps no fp32 masters of bf16 weights",)

    def micro_batch(self, batch: Batch) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.work.dtype == "bf16"):
            loss: Tensor = self.model(**batch).loss
        (loss / self.work.accumulation).backward()
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
