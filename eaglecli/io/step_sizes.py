"""How large the batches of an earlier run were, from its stats.json."""

import json
from pathlib import Path

from eaglecli.errors import UserError
from eaglecli.io.run_directory import STATS


def read_step_sizes(folder: Path) -> list[int]:
    """Iterations by number of requests: entry n counts those of n requests. Raises UserError when the run does not tell."""
    path = folder / STATS
    try:
        counts = json.loads(path.read_text(encoding="utf-8"))["engine"]["iterations_by_requests"]
        by_size = {int(size): int(count) for size, count in counts.items()}
    except OSError as error:
        raise UserError(
            f"--from-run: {path} cannot be read: {error.strerror or error}", "name a run directory of `eaglecli generate`"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"--from-run: {path} does not tell the sizes of its batches", "name a run that got as far as generating") from error
    if not by_size:
        raise UserError(f"--from-run: the run in {folder} had no iteration", "name a run that got as far as generating")
    return [by_size.get(size, 0) for size in range(max(by_size) + 1)]
