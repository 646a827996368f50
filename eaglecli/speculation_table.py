"""Speculation in words: a triple as `steps/topk/draft tokens` or `none`, and tables of them by batch size. Pure text and numbers."""

import json
from collections.abc import Mapping
from typing import Any

Triple = tuple[int, int, int]
NO_TRIPLE: Triple = (0, 1, 1)  # plain decoding


def parse_triple(text: Any) -> Triple:
    """ "5/1/6" to (5, 1, 6), "none" to (0, 1, 1). Raises ValueError; whether the numbers fit each other is for the engine to say."""
    if text == "none":
        return NO_TRIPLE
    parts = text.split("/") if isinstance(text, str) else ()
    if len(parts) != 3 or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"must name speculation as steps/topk/draft tokens like 5/1/6, or none, not {text!r:.80}")
    return int(parts[0]), int(parts[1]), int(parts[2])


def format_triple(triple: Triple) -> str:
    """The reverse of `parse_triple`."""
    return "none" if triple[0] == 0 else "/".join(map(str, triple))


def normalize_table(value: Any) -> dict[str, list[str]]:
    """Speculation by batch size, as JSON text or a mapping, best first: {"1": "7/1/8", "64": ["3/1/4", "none"]}. Raises ValueError.

    A row holds for batches from the size before it up to its own. Sizes come out ascending, every row as a list.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError(f"must be a JSON object of batch sizes, not {value!r:.80}") from None
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f"must be an object of batch sizes, not {value!r:.80}")
    rows: dict[int, list[str]] = {}
    for size, named in value.items():
        if isinstance(size, bool) or not str(size).isdecimal() or int(size) < 1:
            raise ValueError(f"must have batch sizes of at least 1 for keys, not {size!r:.80}")
        names = list(named) if isinstance(named, list | tuple) else [named]
        if not names:
            raise ValueError(f"names no speculation for batches of {size}")
        rows[int(size)] = list(dict.fromkeys(format_triple(parse_triple(name)) for name in names))
    return {str(size): rows[size] for size in sorted(rows)}
