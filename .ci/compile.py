"""Compile what DeepSpeed needs on a machine without a GPU, once, so that no test waits for it.

Also if it is there: ninja makes it anew if DeepSpeed has been installed since, which takes a second if not.
"""

from deepstow.launch.doctor import build_op
from deepstow.trainer.distributed.deepspeed_ops import SHM, cache_folder, clear_abandoned_builds, compiler

clear_abandoned_builds()
if compiler() is not None and (failed := build_op(SHM, cache_folder() / SHM.name)):
    print(failed)
