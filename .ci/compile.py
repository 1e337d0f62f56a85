"""Compile what DeepSpeed needs on a machine without a GPU, once, so that no test waits for it."""

import contextlib
import io

from trainer.dist.deepspeed_ops import announcement, compiler

note = announcement()
if note is not None and compiler() is not None:
    print(note, flush=True)
    with contextlib.redirect_stdout(io.StringIO()):
        from deepspeed.comm.torch import build_shm_op

        build_shm_op()
