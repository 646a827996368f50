"""Runs before any kernel is imported: without a GPU, Triton kernels are interpreted on the CPU.

One thread a process: the suite runs a worker a core, and threads that wait for each other are ten times slower than one.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported, here and in the processes that tests start

import pytest  # noqa: E402
import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
