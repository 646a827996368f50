"""Documents packed into sequences of one length, and sequences put together to the flat batches that the trainer runs.

A batch is T positions in a row. `starts` cuts it into documents and the padding behind each sequence; positions count from
0 in each of them, and attention never crosses a cut. Index t of the draft is the pair (token t + 1, state of position t),
so the last index of a document holds a foreign token: no label looks at it, and no other index sees it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eaglecli.training.documents import Document

_PADDING_ID = 0


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """T positions, D cuts, M label rows, K unrolled steps.

    At a label row p the target's logits say what follows token p. Draft step k predicts the same from index p - k - 1;
    `is_drafted` tells whether the engine would draft there: the token of that index and the predicted one are of one answer.
    """

    input_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int32 [T]
    starts: torch.Tensor  # int32 [D + 1]
    label_rows: torch.Tensor  # int64 [M]
    is_drafted: torch.Tensor  # bool [K, M]
    max_document_len: int

    @property
    def num_positions(self) -> int:
        """T, padding included."""
        return len(self.input_ids)


def pack(documents: Sequence[Document], sequence_length: int) -> list[list[int]]:
    """Numbers of documents for each sequence: best fit, longest first. Longer documents are left out, not cut."""
    open_rooms = 0  # bit r is set while a sequence with r free positions is open
    by_room: list[list[int]] = [[] for _ in range(sequence_length + 1)]
    packs: list[list[int]] = []
    lengths = np.array([len(document) for document in documents], np.int64)
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        if length > sequence_length:
            continue
        fitting = open_rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            place = by_room[room].pop()
            if not by_room[room]:
                open_rooms &= ~(1 << room)
        else:
            room, place = sequence_length, len(packs)
            packs.append([])
        packs[place].append(number)
        by_room[room - length].append(place)
        open_rooms |= 1 << (room - length)
    return packs


def make_batch(
    documents: Sequence[Document], packs: Sequence[Sequence[int]], sequence_length: int, num_unroll_steps: int, device: torch.device
) -> PackedBatch:
    """The sequences `packs` side by side, as tensors on `device`."""
    num_positions = len(packs) * sequence_length
    input_ids = np.full(num_positions, _PADDING_ID, np.int64)
    is_answer = np.zeros(num_positions, bool)
    starts: list[int] = []
    for place, numbers in enumerate(packs):
        cursor = place * sequence_length
        for number in numbers:
            document = documents[number]
            starts.append(cursor)
            input_ids[cursor : cursor + len(document)] = document.token_ids
            is_answer[cursor + document.answer_start : cursor + len(document)] = True
            cursor += len(document)
        if cursor < (place + 1) * sequence_length:
            starts.append(cursor)
    bounds = np.array([*starts, num_positions])
    lengths = np.diff(bounds)
    start_of = np.repeat(bounds[:-1], lengths)
    rows, is_drafted = _labels(is_answer, start_of, num_unroll_steps)
    return PackedBatch(
        input_ids=_to_device(input_ids, device),
        positions=_to_device((np.arange(num_positions) - start_of).astype(np.int32), device),
        starts=_to_device(bounds.astype(np.int32), device),
        label_rows=_to_device(rows, device),
        is_drafted=_to_device(is_drafted, device),
        max_document_len=int(lengths.max()),
    )


def _labels(is_answer: np.ndarray, start_of: np.ndarray, num_unroll_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Label rows int64 [M] (the next token belongs to an answer), and bool [K, M]: step k reaches them from inside that answer."""
    has_label = np.zeros_like(is_answer)
    has_label[:-1] = is_answer[1:] & (start_of[1:] == start_of[:-1])
    rows = np.flatnonzero(has_label)
    steps = np.arange(num_unroll_steps)[:, None]
    index = rows - steps - 1
    is_inside = index >= start_of[rows]
    return rows, is_inside & is_answer[np.maximum(rows - steps, 0)]


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
