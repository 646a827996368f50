"""How near a kernel must come to its float64 reference, by dtype, and what stands in unwritten memory."""

import torch

RELATIVE_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def assert_near(out: torch.Tensor, expected: torch.Tensor) -> None:
    """|out - expected| / |expected| within the limit of out's dtype, and no element far off; NaN never passes."""
    limit = RELATIVE_ERROR[out.dtype]
    assert out.shape == expected.shape
    difference = (out.double() - expected.double()).abs()
    norm = expected.double().norm()
    assert difference.norm() <= limit * norm + 1e-12, f"relative error {(difference.norm() / norm).item():.3g}, limit {limit}"
    assert difference.max() <= 20 * limit * expected.double().abs().max() + 1e-12


def poison_free_memory(device: str) -> None:
    """What `torch.empty` gives next on the GPU holds NaN, so an element that a kernel does not write is seen."""
    if device == "cuda":
        blocks = [torch.full((1 << power,), float("nan"), device=device) for power in (9, 12, 16, 20, 22)]
        del blocks
