"""Maps from draft ids to target ids: offsets, not indices; contradictions are found at load (known failure B03)."""

from pathlib import Path

import pytest
import torch

from eaglecli.errors import ModelError, UserError
from eaglecli.models.draft_vocabulary import read_token_map_file, token_map_from_offsets
from tests.fixtures import scattered_ids, vocabulary_tables


def test_offsets_of_the_worked_example_name_the_used_tokens() -> None:
    """Used ids {2, 3, 7} give d2t [2, 2, 5]."""
    tables = vocabulary_tables(torch.tensor([2, 3, 7]), vocab_size=8)
    assert tables["d2t"].tolist() == [2, 2, 5]
    assert token_map_from_offsets(tables["d2t"], tables["t2d"], 8, "draft").tolist() == [2, 3, 7]


def test_scattered_vocabulary_survives_the_round_trip() -> None:
    token_ids = scattered_ids(64)
    tables = vocabulary_tables(token_ids)
    assert torch.equal(token_map_from_offsets(tables["d2t"], tables["t2d"], 320, "draft"), token_ids)
    assert torch.equal(token_map_from_offsets(tables["d2t"].int(), None, 320, "draft"), token_ids)


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize(
    ("d2t", "members", "reason"),
    [
        (offsets(-1, 2, 5), None, r"d2t\[0\] = -1 gives target id -1"),
        (offsets(2, 2, 6), None, r"d2t\[2\] = 6 gives target id 8, outside 0\.\.7"),
        (offsets(2, 5, 2), None, "must ascend"),
        (offsets(2, 1, 5), None, "must ascend without repeats"),
        (offsets(2, 2, 4), (2, 3, 7), "contradict each other"),
        (offsets(2, 3), (2, 3, 7), "contradict each other"),
        (offsets(2, 3, 7), (2, 3, 7), "target ids themselves"),
        (offsets(2, 3, 7), None, "target ids themselves"),
    ],
)
def test_bad_offset_tables_are_refused_with_the_reason(d2t: torch.Tensor, members: tuple[int, ...] | None, reason: str) -> None:
    t2d = None
    if members is not None:
        t2d = torch.zeros(8, dtype=torch.bool)
        t2d[list(members)] = True
    with pytest.raises(ModelError, match=reason):
        token_map_from_offsets(d2t, t2d, 8, "draft")


def test_token_map_file_keeps_the_order_of_the_file(tmp_path: Path) -> None:
    torch.save([7, 2, 3], tmp_path / "list.pt")
    torch.save(torch.tensor([7, 2, 3], dtype=torch.int32), tmp_path / "tensor.pt")
    for name in ("list.pt", "tensor.pt"):
        token_map = read_token_map_file(tmp_path / name, 8)
        assert token_map.tolist() == [7, 2, 3]
        assert token_map.dtype == torch.int64


class Payload:
    """A pickled call: what a harmful file would hold."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("executed",))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([1, 8], r"outside 0\.\.7"),
        ([-1, 2], r"outside 0\.\.7"),
        ([1, 1], "ids twice"),
        ([0.5, 1.5], "not a list of token ids"),
        ([], "not a list of token ids"),
        ([[1, 2]], "not a list of token ids"),
        ({"ids": [1]}, "cannot be read"),
        (Payload(), "cannot be read"),
    ],
)
def test_bad_token_map_files_are_refused_with_the_reason(
    content: object, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(content, tmp_path / "map.pt")
    with pytest.raises(UserError, match=reason):
        read_token_map_file(tmp_path / "map.pt", 8)
    assert "executed" not in capsys.readouterr().out


def test_missing_token_map_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_token_map_file(tmp_path / "absent.pt", 8)
