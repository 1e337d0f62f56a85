"""A process whose segments of device memory expand: blocks of growing sizes take no more than the largest of them."""

import torch

MIB = 1 << 20


def main() -> None:
    for mib in range(8, 72, 8):
        block = torch.full((mib * MIB,), 3, dtype=torch.uint8, device="cuda")
        assert block.sum().item() == 3 * mib * MIB
        del block
    assert torch.cuda.max_memory_reserved() < 100 * MIB, "288 MiB if each had its own"
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0


if __name__ == "__main__":
    main()
