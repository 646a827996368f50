"""What the library's products of many rows reach: what bounds an 8B model's steps once more than 64 rows are verified at a time.

    python -m benchmarks.library_products

For every product of a Llama-3.1-8B layer and its head, TFLOP/s in bfloat16 with the two libraries that torch can call: in short bursts
after a pause, and without a pause for `--seconds`, as in a run. Weights come in turn from a pool larger than the L2; launched by graph.
"""

import argparse
import time
from collections.abc import Sequence

import torch
from torch.nn import functional

PRODUCTS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336), "head": (128256, 4096)}
ROWS = (64, 256, 512, 1024, 2048)
BURST_S, PAUSE_S = 0.01, 0.1
POOL_BYTES = 1 << 28
EXPECTED_RATE = 5e14  # operations a second


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each product and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    options = parser.parse_args(arguments)
    libraries = ("cublas", "cublaslt")
    print(f"{'product':9}{'rows':>6}" + "".join(f"{f'{library} burst':>17}{'sustained':>11}" for library in libraries), flush=True)
    for name, (num_outputs, num_inputs) in PRODUCTS.items():
        count = max(2, POOL_BYTES // (2 * num_outputs * num_inputs))
        weights = [torch.empty(num_outputs, num_inputs, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02) for _ in range(count)]
        for num_rows in options.rows:
            x = torch.empty(num_rows, num_inputs, dtype=torch.bfloat16, device="cuda").normal_()
            line = f"{name:9}{num_rows:6}"
            for library in libraries:
                torch.backends.cuda.preferred_blas_library(library)
                time.sleep(PAUSE_S)
                burst, sustained = tflops(x, weights, BURST_S), tflops(x, weights, options.seconds)
                line += f"{burst:17.0f}{sustained:11.0f}"
            print(line, flush=True)
        del weights
    return 0


def tflops(x: torch.Tensor, weights: Sequence[torch.Tensor], seconds: float) -> float:
    """TFLOP/s of products back to back for about so many seconds, by events. x bfloat16 [T, I], weights [O, I]."""
    functional.linear(x, weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            functional.linear(x, weight)
    operations = 2 * x.shape[0] * weights[0].numel() * len(weights)
    count = max(1, int(seconds * EXPECTED_RATE / operations))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(count):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return operations * count / begin.elapsed_time(end) / 1e9


if __name__ == "__main__":
    raise SystemExit(main())
