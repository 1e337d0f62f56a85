"""A head cut into pieces of its words against the whole: which of its results keep their bits. ``$1``: threads."""

import sys

import torch
from torch.nn.functional import linear


def differs(found: torch.Tensor, whole: torch.Tensor) -> str:
    """"equal", or the norm of the difference by that of the whole."""
    if torch.equal(found, whole):
        return "equal"
    return f"{float((found.double() - whole.double()).norm() / whole.double().norm()):.1e}"


def compare(dtype: torch.dtype, tokens: int, hidden: int, words: int, number: int) -> str:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    weight = (torch.randn(words, hidden, generator=generator) * 0.02).to(dtype)
    grad = (torch.randn(tokens, words, generator=generator) * 1e-3).to(dtype)
    size = -(-words // number // 64) * 64
    pieces = [slice(start, min(start + size, words)) for start in range(0, words, size)]
    logits = torch.cat([linear(x, weight[piece]) for piece in pieces], 1)
    of_weight = torch.cat([grad[:, piece].t() @ x for piece in pieces])
    whole = grad.t() @ x
    of_x = sum(grad[:, piece] @ weight[piece] for piece in pieces)
    in_fp32 = sum(grad[:, piece].float() @ weight[piece].float() for piece in pieces).to(dtype)
    norm = torch.linalg.vector_norm(whole, dtype=torch.float32)
    norms = torch.stack([torch.linalg.vector_norm(of_weight[piece], dtype=torch.float32) for piece in pieces])
    exact = torch.linalg.vector_norm(whole.double())
    return (
        f"logits {differs(logits, linear(x, weight))}, gradient of the weight {differs(of_weight, whole)}, "
        f"of x {differs(of_x, grad @ weight)}, summed in fp32 {differs(in_fp32, grad @ weight)}, "
        f"norm {float(norm / exact - 1):+.1e}, of pieces {float(torch.linalg.vector_norm(norms) / exact - 1):+.1e}"
    )


torch.set_num_threads(int(sys.argv[1]))
for dtype in (torch.float32, torch.bfloat16):
    for shape in ((256, 512, 8192), (512, 1024, 32000), (96, 320, 50257)):
        for number in (2, 4, 8):
            print(dtype, *shape, f"in {number}:", compare(dtype, *shape, number), flush=True)
