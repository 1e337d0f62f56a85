"""Load a model whose weights are divided after they are loaded, as DeepSpeed's tensor parallelism does, slice by slice.

The first rank of a machine writes all weights into a file, one by one, and every rank maps each of them by itself:
their pages are the file's, there once for all ranks, and the kernel may drop them. A rank has memory of its own for
the slices that are copied, and a mapping ends with its weight. The file loses its name when all ranks have opened it.

It takes as much of the disk of the run's folder as the model is large, for as long as a rank has a weight of it that is
not divided or copied.

``Spilled`` is the way back: who writes the whole model has its tensors one by one from the ranks that have parts of
them, and on the disk all others. The file has no name from the beginning, so nothing of it outlives the process.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor, nn

from deepstow.strategies.core.sizes import human
from deepstow.strategies.engine.memory.scratch_file import Checksums, DiskError
from deepstow.trainer.errors import ConfigError
from deepstow.trainer.model import parts
from deepstow.trainer.model.build import tensors_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from deepstow.trainer.distributed.agreement import Agreement

PIECE_BYTES = 16 << 20


def load(
    model: PreTrainedModel,
    fill: Callable[[parts.Give], PreTrainedModel],
    path: Path,
    together: Agreement,
    *,
    writes: bool,
) -> None:
    """Give ``model``, which is on the device ``meta``, its values; a collective.

    Args:
        fill: gives away all parameters of a model of the same kind, and returns it with its buffers.
        path: of the file; the same for the ranks of a machine, and its own for each machine.
        writes: whether this rank is its machine's first one.

    Raises:
        ConfigError: the file cannot be written.
    """
    tied = model.all_tied_weights_keys
    places: dict[str, int] = {}
    end = 0
    for name, tensor in tensors_of(model):
        if name not in tied:
            places[name], end = end, end + _rounded(tensor.nbytes)

    def write() -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.truncate(end)

                def give(name: str, value: Tensor) -> None:
                    file.seek(places[name])
                    _write(file, value)

                for name, buffer in fill(give).named_buffers(remove_duplicate=False):
                    give(name, buffer)
        except OSError as error:
            with suppress(OSError):
                path.unlink()
            what = f"the weights need {human(end)} there while they are divided over the ranks"
            raise ConfigError(f"{path}: cannot be written ({error.strerror or error}): {what}") from None

    together.by_some(writes, write)
    with path.open("rb") as file:
        for name, tensor in list(tensors_of(model)):
            if name in places:
                value = _map(file, places[name], tensor)
                is_param = isinstance(tensor, nn.Parameter)
                parts.put(model, name, nn.Parameter(value, tensor.requires_grad) if is_param else value.clone())
    model.tie_weights(recompute_mapping=False)
    together.by_some(writes, lambda: None)  # all have opened it
    if writes:
        path.unlink()


class Spilled:
    """Puts tensors into a file in ``folder`` and gives them back as they are mapped from there.

    That the disk is full is said by ``settle``: who gathers has to go on meanwhile, since other ranks are sending. What
    was made of the tensors may be kept when ``refuse_damaged`` returns: the drive has given back what was written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._file, self._error = folder, None, None  # type: Path, Any, OSError | None
        self.num_bytes = 0  # that the file takes on the disk
        self._sums, self._sizes = Checksums(), dict[int, int]()  # of its pieces, by place

    def __call__(self, value: Tensor) -> Tensor:
        if self._error is None:
            try:
                if self._file is None:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - what is mapped needs it
                place = self._file.seek(_rounded(self._file.seek(0, os.SEEK_END)))
                at = place
                for piece in _pieces(value.cpu()):
                    self._file.write(piece.numpy().data)
                    self._sums.note(piece, at)
                    self._sizes[at] = len(piece)
                    at += len(piece)
                self._file.flush()
                self.num_bytes = self._file.tell()
                return _map(self._file, place, value)
            except OSError as error:
                self._error = error
                self._close()  # what is not mapped goes back to the disk
        return torch.empty(0, dtype=value.dtype)

    def settle(self) -> None:
        """All tensors have come. OSError: some of them could not be written, and are empty."""
        if self._error is not None:
            raise self._error

    def refuse_damaged(self) -> None:
        """After the last use of the tensors. DiskError: one may not have been what was written."""
        for place, size in self._sizes.items():
            content = torch.frombuffer(bytearray(os.pread(self._file.fileno(), size, place)), dtype=torch.uint8)
            if len(content) != size or self._sums.first_difference(content, place) is not None:
                raise DiskError(
                    f"{self._folder}: weights that were put on this disk to be saved are not what was written"
                )
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # of what was not written any more
                self._file.close()
            self._file = None


def _rounded(num_bytes: int) -> int:
    """Up to where a mapping may begin."""
    return -(-num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def _write(file: BinaryIO, value: Tensor) -> None:
    for piece in _pieces(value):
        file.write(piece.numpy().data)


def _pieces(value: Tensor) -> Iterator[Tensor]:
    """Its bytes, as copies: memory that numpy has seen cannot be taken back."""
    for piece in value.detach().contiguous().view(-1).view(torch.uint8).split(PIECE_BYTES):
        if len(piece):
            yield piece.clone()


def _map(file: BinaryIO, offset: int, like: Tensor) -> Tensor:
    """What is at ``offset``, in the shape of ``like``; who writes to it has a copy of the page."""
    if not like.numel():
        return torch.empty_like(like, device="cpu")
    flags: Any = {"flags": mmap.MAP_PRIVATE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
    memory = mmap.mmap(file.fileno(), like.nbytes, offset=offset, **flags)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)
