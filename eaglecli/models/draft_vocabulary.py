"""Maps from draft-vocabulary ids to target ids: the `d2t` offsets of EAGLE-3, the FR-Spec token list of EAGLE-1/2.

The two are easy to take for one another: `d2t[j]` is an *offset* (target id = j + d2t[j]) of an ascending list of
target ids, an FR-Spec file holds target ids themselves, in any order.
Sources: Li et al., "EAGLE-3"; Zhao et al., "FR-Spec"; files of SafeAILab/EAGLE and thunlp.
"""

import pickle
from pathlib import Path

import torch

from eaglecli.errors import ModelError, UserError


def token_map_from_offsets(d2t: torch.Tensor, t2d: torch.Tensor | None, vocab_size: int, where: str) -> torch.Tensor:
    """Target id of every draft id: int64 [Vd], strictly ascending, below `vocab_size`.

    d2t holds Vd integer offsets; t2d, where the file has one, marks the members of the draft vocabulary.
    Raises ModelError when the table cannot be a map of offsets or when the two tables contradict each other.
    """
    if d2t.is_floating_point() or d2t.dtype == torch.bool:
        raise ModelError(f"{where}: d2t is stored as {d2t.dtype}, expected whole numbers")
    offsets = d2t.to(torch.int64).flatten()
    token_ids = offsets + torch.arange(len(offsets))
    members = None if t2d is None else torch.nonzero(t2d.flatten()).flatten()
    problem = _describe_problem(offsets, token_ids, members, vocab_size)
    if problem is not None:
        if _looks_like_index_map(offsets, members, vocab_size):
            problem += "; the table seems to hold target ids themselves, while d2t must hold offsets (target id = j + d2t[j])"
        raise ModelError(f"{where}: {problem}", "the table and the head must come from the same training run")
    return token_ids


def _describe_problem(offsets: torch.Tensor, token_ids: torch.Tensor, members: torch.Tensor | None, vocab_size: int) -> str | None:
    outside = torch.nonzero((token_ids < 0) | (token_ids >= vocab_size)).flatten()
    if len(outside) > 0:
        entry = int(outside[0])
        return f"d2t[{entry}] = {int(offsets[entry])} gives target id {int(token_ids[entry])}, outside 0..{vocab_size - 1}"
    falling = torch.nonzero(token_ids[1:] <= token_ids[:-1]).flatten()
    if len(falling) > 0:
        entry = int(falling[0]) + 1
        pair = f"target id {int(token_ids[entry])} after {int(token_ids[entry - 1])}"
        return f"d2t[{entry}] gives {pair}: the ids must ascend without repeats"
    if members is not None and not torch.equal(members, token_ids):
        counts = f"t2d marks {len(members)} tokens, and they are not the {len(token_ids)} tokens of d2t"
        return f"d2t and t2d contradict each other: {counts}"
    return None


def _looks_like_index_map(offsets: torch.Tensor, members: torch.Tensor | None, vocab_size: int) -> bool:
    if members is not None:
        return torch.equal(members, offsets)
    ascends = bool((offsets[1:] > offsets[:-1]).all())
    return len(offsets) > 1 and ascends and int(offsets[0]) >= 0 and int(offsets[-1]) < vocab_size


def read_token_map_file(path: Path, vocab_size: int) -> torch.Tensor:
    """Target ids of an FR-Spec file (a list or an integer tensor saved by torch), in the order of the file: int64 [Vd].

    Raises UserError when the file cannot be read, or names a token twice or outside the target's vocabulary.
    """
    hint = "--speculative-token-map takes a .pt file with a list or an integer tensor of target token ids"
    try:
        token_ids = torch.as_tensor(torch.load(path, map_location="cpu", weights_only=True))
    except (OSError, RuntimeError, ValueError, TypeError, EOFError, pickle.UnpicklingError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"token map {path} cannot be read: {reason}", hint) from error
    is_integer = not (token_ids.is_floating_point() or token_ids.is_complex() or token_ids.dtype == torch.bool)
    if token_ids.dim() != 1 or not is_integer or len(token_ids) == 0:
        kind = f"{token_ids.dtype} tensor of shape {list(token_ids.shape)}"
        raise UserError(f"token map {path} holds a {kind}, not a list of token ids", hint)
    token_ids = token_ids.to(torch.int64)
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= vocab_size:
        span = f"{int(token_ids.min())}..{int(token_ids.max())}"
        raise UserError(f"token map {path} names ids {span}, outside 0..{vocab_size - 1}", hint)
    if len(token_ids.unique()) != len(token_ids):
        raise UserError(f"token map {path} names {len(token_ids) - len(token_ids.unique())} ids twice", hint)
    return token_ids
