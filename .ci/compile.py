"""Compile what DeepSpeed needs on a machine without a GPU, once, so that no test waits for it."""

from launch.doctor import build_op
from trainer.dist.deepspeed_ops import SHM, announcement, cache_folder, clear_abandoned_builds, compiler

clear_abandoned_builds()
if announcement() is not None and compiler() is not None and (failed := build_op(SHM, cache_folder() / SHM.name)):
    print(failed)
