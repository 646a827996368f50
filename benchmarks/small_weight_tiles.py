"""Which tile computes the products of small weights soonest, in whole iterations of SmolLM2's shape, where launches overlap.

    python -m benchmarks.small_weight_tiles
    python -m benchmarks.small_weight_tiles --case plain/64 5-1-6/8 --tile 32,64,64,4,6 64,64,128,4,4

Timed one by one products say little of it: the next kernel starts while one ends (`kernels/launch.py`). A line is a case (triple and
requests), a column a tile (rows, outputs, inputs, warps, stages) for every layer's products of more than one row; first what is chosen now.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.dummy_models import DummyPair, load_dummy_pair
from benchmarks.host_time import CONTEXT, open_engine
from eaglecli.engine.settings import PLAIN, SpeculationSettings
from eaglecli.kernels import linear
from eaglecli.kernels.linear_tiles import SMALL_WEIGHT_BYTES, LinearTile, MatrixTile

CASES = "plain/8 plain/32 plain/64 plain/128 plain/256 5-1-6/1 5-1-6/8 5-1-6/16 3-1-4/64 3-1-4/128 6-4-32/1".split()
TILES = ("8,16,256,4,3,4", "16,64,64,4,6", "32,64,64,4,6", "32,64,128,4,4", "64,64,64,4,6", "64,64,128,4,4")
NUM_ITERATIONS = 80
Choice = Callable[..., LinearTile]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each case, milliseconds of an iteration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", default=CASES, help="steps-topk-tokens/requests, or plain/requests")
    parser.add_argument("--tile", nargs="+", default=TILES)
    options = parser.parse_args(arguments)
    chosen = linear.choose_tile
    choices = {"now": chosen} | {tile: always(MatrixTile(*map(int, tile.split(","))), chosen) for tile in options.tile}
    print(f"{'case':12}" + "".join(f"{name:>16}" for name in choices), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        pair = load_dummy_pair("smollm2", Path(folder), torch.bfloat16, torch.device("cuda"), CONTEXT)
        for case in options.case:
            times = []
            for choice in choices.values():
                linear.choose_tile = choice  # type: ignore[assignment]
                times.append(iteration_ms(pair, case))
            print(f"{case:12}" + "".join(f"{ms:16.3f}" for ms in times), flush=True)
    return 0


def always(tile: MatrixTile, chosen: Choice) -> Choice:
    """That tile for every product of more than one row with a small weight."""

    def choose(num_rows: int, num_outputs: int, num_inputs: int, gate_up: bool, dtype: torch.dtype, launches_overlap: bool) -> LinearTile:
        is_small = (2 if gate_up else 1) * num_outputs * num_inputs * dtype.itemsize <= SMALL_WEIGHT_BYTES
        return tile if is_small and num_rows > 1 else chosen(num_rows, num_outputs, num_inputs, gate_up, dtype, launches_overlap)

    return choose


def iteration_ms(pair: DummyPair, case: str) -> float:
    """Mean of a few iterations, by graph."""
    triple, batch = case.split("/")
    speculation = PLAIN if triple == "plain" else SpeculationSettings(*map(int, triple.split("-")))
    engine = open_engine(pair, speculation, int(batch))
    torch.cuda.synchronize()
    started = perf_counter()
    for _ in range(NUM_ITERATIONS):
        engine.step()
    torch.cuda.synchronize()
    return (perf_counter() - started) / NUM_ITERATIONS * 1e3


if __name__ == "__main__":
    raise SystemExit(main())
