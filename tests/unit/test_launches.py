"""How many kernels a device is given one by one for backward, counted by hand."""

import pytest
import torch
from torch import Tensor, nn

from deepstow.trainer.model.stubs import fake_tensors
from deepstow.trainer.model.temporaries import count


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x.view(2, 4) @ self.weight).relu()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(4, 4), nn.ModuleList([Layer() for _ in range(5)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.exp()


@pytest.mark.parametrize("frozen", [False, True])
def test_kernels_of_backward(frozen: bool) -> None:
    """A block: of relu, of the product's two factors. Below: the gradients of weight and bias. Above: the first one,
    and of exp. Blocks that are alike count as one that ran.
    """
    with torch.device("meta"):
        model = Model()
    model.layers.requires_grad_(not frozen)
    with fake_tensors():
        x = torch.ones(2, 4)
        found = count(model, lambda: model(x))
    assert [unit.launches for unit in found.units()] == [1, *[2] * 5, 1]
    assert [unit.launches_back for unit in found.units()] == [2, *[2 if frozen else 3] * 5, 2]
