"""What a bug report needs to know about the machine and the installation."""

import importlib.metadata
import json
import platform
import subprocess
from pathlib import Path

import torch

import eaglecli
from eaglecli.io.run_report import find_versions

DRIVER_FILE = Path("/proc/driver/nvidia/version")


def describe_environment() -> dict[str, str | None]:
    """Name to value; None for what is not there."""
    found = find_versions()
    return {
        **found,
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "gpu": _gpus(),
        "processor": platform.machine(),
        "commit": _commit(),
    }


def _driver() -> str | None:
    try:
        first_line = DRIVER_FILE.read_text(encoding="utf-8", errors="replace").splitlines()[0]
    except (OSError, IndexError):
        return None
    return first_line.removeprefix("NVRM version:").strip()


def _gpus() -> str | None:
    if not torch.cuda.is_available():
        return None
    names = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return ", ".join(f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor})" for gpu in names)


def _commit() -> str | None:
    """Of the checkout that the code lies in, or the one that pip installed from."""
    folder = Path(eaglecli.__file__).parent.parent
    if (folder / ".git").exists():
        try:
            command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
        except (OSError, subprocess.SubprocessError):
            return None
    try:
        origin = importlib.metadata.distribution("eaglecli").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    return json.loads(origin or "{}").get("vcs_info", {}).get("commit_id")
