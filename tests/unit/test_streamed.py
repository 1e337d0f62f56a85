"""A model that is only asked: a teacher, one that is measured, or the exact one beside its 8 bits."""

import torch

from deepstow.trainer.data import packing
from deepstow.trainer.data.collate import Collator
from deepstow.trainer.planning.streamed import placed
from tests.helpers.models import build


def test_documents_of_a_packed_row_do_not_see_each_other() -> None:
    """As in training, whatever cache the saved model asks for, which it has again afterwards."""
    model = build("llama").eval()
    model.config.use_cache = True
    documents = [torch.arange(1, 6), torch.arange(7, 14)]
    rows = packing.rows(packing.whole([5, 7]), lambda index: (documents[index].numpy(),) * 2, 12, packing=True)
    with placed(model, None, torch.device("cpu")) as call:
        packed = call(**Collator(0, packing=True)(list(rows))).logits[0, :12]
        alone = torch.cat([call(input_ids=document[None]).logits[0] for document in documents])
    assert model.config.use_cache
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)
