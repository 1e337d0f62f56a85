"""What first moments in 8 bits do to weights, by the map that rounds them, where one input feature is larger.

    OMP_NUM_THREADS=1 python benchmarks/records/2026-11-29_moments-squares_2-core/maps.py
"""

import torch
from bitsandbytes.functional import create_dynamic_map
from torch import Tensor, nn

BLOCK = 256
FEATURES = 256
STEPS = 300
RATE = 1e-3
noise = torch.Generator()


def by_block(values: Tensor) -> Tensor:
    """[blocks, BLOCK], the last one filled up with zeros."""
    missing = -values.numel() % BLOCK
    return torch.cat([values.flatten(), values.new_zeros(missing)]).view(-1, BLOCK)


def rounded(values: Tensor) -> Tensor:
    """Up as often as the number is near to the upper neighbour."""
    return torch.floor(values + torch.rand(values.shape, generator=noise))


def largest_of(blocks: Tensor) -> Tensor:
    return blocks.abs().amax(1, keepdim=True).clamp_min(1e-38)


def multiples(blocks: Tensor) -> Tensor:
    step = largest_of(blocks) / 127
    return rounded(blocks / step) * step


def squares(blocks: Tensor) -> Tensor:
    step = largest_of(blocks) / 127**2
    return rounded((blocks.abs() / step).sqrt()).square() * step * blocks.sign()


def exponents(blocks: Tensor) -> Tensor:
    """Our second moments: 3 bits of mantissa, 2^-32 of the largest at least."""
    top = largest_of(blocks).log2().floor()
    exponent = torch.maximum(blocks.clamp_min(1e-45).log2().floor(), top - 31)
    step = torch.exp2(exponent - 3)
    found = (rounded(blocks / step) * step).clamp_min(0.0)
    return torch.where((found == 0) & (blocks > 0), torch.exp2(top - 31), found)


def dynamic(blocks: Tensor, *, signed: bool) -> Tensor:
    """bitsandbytes' map, to the nearest."""
    code = create_dynamic_map(signed=signed).sort().values
    values = (blocks / largest_of(blocks)).contiguous()
    above = torch.searchsorted(code, values).clamp(1, 255)
    low, high = code[above - 1], code[above]
    return torch.where(values - low > high - values, high, low) * largest_of(blocks)


MAPS = {
    "multiples": (multiples, exponents),
    "squares": (squares, exponents),
    "bitsandbytes' first, our second": (lambda blocks: dynamic(blocks, signed=True), exponents),
    "bitsandbytes' both": (lambda blocks: dynamic(blocks, signed=True), lambda blocks: dynamic(blocks, signed=False)),
}


def trained(kind: str | None, times: float, seed: int) -> tuple[Tensor, Tensor]:
    """All weights after training with AdamW, and before."""
    noise.manual_seed(5)
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 1))
    with torch.no_grad():
        net[0].weight.mul_(0.5)
    rows = torch.randn(4096, FEATURES)
    wanted = (rows[:, :16] @ torch.randn(16, 1)).tanh() + 0.1 * torch.randn(4096, 1)
    rows[:, 3] *= times
    start = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=0.0)
    for step in range(1, STEPS + 1):
        some = torch.randint(0, 4096, (64,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (net(rows[some]) - wanted[some]).square().mean().backward()
        optimizer.step()
        for state in optimizer.state.values() if kind else ():
            for key, rounds in zip(("exp_avg", "exp_avg_sq"), MAPS[kind], strict=True):
                found = rounds(by_block(state[key])).flatten()[: state[key].numel()]
                state[key].copy_(found.view(state[key].shape))
    return nn.utils.parameters_to_vector(net.parameters()).detach(), start


def main() -> None:
    torch.set_num_threads(1)
    for times in (1, 100, 1000):
        for seed in range(3):
            exact, start = trained(None, times, seed)
            off = {kind: (trained(kind, times, seed)[0] - exact).norm() / (exact - start).norm() for kind in MAPS}
            print(f"x {times}, seed {seed}:", ", ".join(f"{kind} {part:.3f}" for kind, part in off.items()), flush=True)


if __name__ == "__main__":
    main()
