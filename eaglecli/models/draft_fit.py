"""Whether a draft fits a target, told from headers and configs alone: no weights are read, no device is touched.

`check_draft_fit` either raises ModelError, naming tensor, expected and found, or returns everything that loading needs.
Head and embedding are the draft's own or the target's by what is in the file, not by a flag of the config. Rows beyond
the target's vocabulary are padding and are cut off; a vocabulary that is smaller needs a token map.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from eaglecli.errors import ModelError, UserError
from eaglecli.models.config import TargetConfig
from eaglecli.models.draft_config import DraftConfig, build_draft_config, optional_size
from eaglecli.models.draft_description import DraftDescription, read_draft_description
from eaglecli.models.draft_layout import ALGORITHM_TITLES, Algorithm
from eaglecli.models.draft_model import DraftModel
from eaglecli.models.draft_vocabulary import read_token_map_file, token_map_from_offsets
from eaglecli.models.eagle import EagleDraft
from eaglecli.models.eagle3 import Eagle3Draft
from eaglecli.models.rope import RopeTables

HeadSource = Literal["own", "target", "own embedding"]

DRAFT_CLASSES: Mapping[Algorithm, type[EagleDraft] | type[Eagle3Draft]] = {"EAGLE": EagleDraft, "EAGLE3": Eagle3Draft}

# Vocabularies are padded to a multiple of a power of two, 512 at most in published models; more rows are another vocabulary.
_MAX_PADDING_ROWS = 1024

_FREE_TENSORS = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")  # decided here, not by the model's layers


@dataclass(frozen=True, eq=False)
class DraftFit:
    """A draft that fits its target, and how its parts are chosen."""

    description: DraftDescription
    config: DraftConfig
    head: HeadSource
    num_head_rows: int  # rows of that head which may be proposed; the rest is padding
    token_map: torch.Tensor | None  # int64 [Vd] on the CPU
    token_map_source: str
    warnings: tuple[str, ...]

    @property
    def selects_head_rows(self) -> bool:
        """Whether the token map picks rows of a full head (FR-Spec) instead of naming the rows of a short one (d2t)."""
        return self.config.algorithm == "EAGLE" and self.token_map is not None


def check_draft_fit(
    draft_path: Path,
    target_path: Path | None,
    target: TargetConfig,
    algorithm: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    token_map_path: Path | None = None,
) -> DraftFit:
    """Describe the draft in a local folder and hold it against the target; raises ModelError or UserError when they do not fit.

    `algorithm` is what the user asked for ("EAGLE" or "EAGLE3"), None accepts what the file holds. `target_path` serves
    the comparison of paths and tokenizers.
    """
    if target_path is not None and draft_path.resolve() == target_path.resolve():
        hint = "give an EAGLE draft, or --draft none for plain decoding"
        raise ModelError(f"draft and target are the same checkpoint ({draft_path})", hint)
    description = read_draft_description(draft_path, overrides)
    _check_algorithm(description, algorithm)
    config = build_draft_config(description.settings, description.layout, description.shapes, target)
    _check_feature_width(description, config)
    token_map, source = _token_map(description, config, target, token_map_path)
    _check_vocabulary(description, config, target, token_map)
    head = _head_source(description, config, target, token_map)
    _check_tensors(description, config)
    if target_path is not None:
        _check_tokenizers(draft_path, target_path)
    return DraftFit(
        description=description,
        config=config,
        head=head,
        num_head_rows=target.vocab_size if token_map is None else len(token_map),
        token_map=token_map,
        token_map_source=source,
        warnings=_warnings(description, config),
    )


def _check_algorithm(draft: DraftDescription, algorithm: str | None) -> None:
    if algorithm is None or algorithm == draft.layout.algorithm:
        return
    found = draft.layout.algorithm
    raise ModelError(
        f"--speculative-algorithm {algorithm} contradicts the draft {draft.path}, which holds an {ALGORITHM_TITLES[found]} draft ({found})",
        f"leave the option out or give {found}",
    )


def _check_feature_width(draft: DraftDescription, config: DraftConfig) -> None:
    """Without a fusion layer the target's hidden state is used as it is, so the widths must be equal."""
    if (config.algorithm == "EAGLE" or not config.has_fc) and config.layer.hidden_size != config.target_hidden_size:
        name = "fc.weight" if config.algorithm == "EAGLE" else "layers.0.hidden_norm.weight"
        made_for, expected = config.layer.hidden_size, config.target_hidden_size
        raise ModelError(
            f"{draft.layout.spell(name)} is made for hidden size {made_for}, expected the target's {expected}",
            "this draft was made for another target",
        )


# ---- vocabulary ---------------------------------------------------------------------------------------------------


def _token_map(draft: DraftDescription, config: DraftConfig, target: TargetConfig, path: Path | None) -> tuple[torch.Tensor | None, str]:
    if path is not None:
        if config.algorithm != "EAGLE":
            raise UserError(
                "--speculative-token-map is for EAGLE-1/2 drafts, and this is an EAGLE-3 draft, which brings its own map",
                "leave the option out",
            )
        token_map = read_token_map_file(path, target.vocab_size)
        return token_map, f"{path.name}, {len(token_map)} of {target.vocab_size} ids"
    if draft.d2t is None:
        return None, "none"
    if config.algorithm == "EAGLE":
        raise ModelError(f"{draft.path}: tensor d2t belongs to EAGLE-3, but the layers are those of an EAGLE-1/2 draft")
    if not bool(draft.d2t.any()) and len(draft.d2t) >= target.vocab_size:
        return None, "none (d2t is the identity)"
    token_map = token_map_from_offsets(draft.d2t, draft.t2d, target.vocab_size, str(draft.path))
    checked = "" if draft.t2d is None else ", agrees with t2d"
    return token_map, f"d2t, {len(token_map)} of {target.vocab_size} ids{checked}"


def _check_vocabulary(draft: DraftDescription, config: DraftConfig, target: TargetConfig, token_map: torch.Tensor | None) -> None:
    """Every table over target ids must have all of the target's rows; the head may be short when a map says which rows it has."""
    head_rows = _rows(draft, "lm_head.weight")
    embedding_rows = _rows(draft, "embed_tokens.weight")
    if embedding_rows is not None:
        _check_rows(draft, "embed_tokens.weight", embedding_rows, target.vocab_size)
    has_offsets = config.algorithm == "EAGLE3" and token_map is not None
    if has_offsets and head_rows is not None and head_rows != len(token_map):
        raise ModelError(f"lm_head.weight has {head_rows} rows, expected {len(token_map)} as many as d2t has entries ({draft.path})")
    if not has_offsets and head_rows is not None:
        _check_rows(draft, "lm_head.weight", head_rows, target.vocab_size)
    _check_claimed_draft_vocabulary(draft, target, token_map if has_offsets else None)
    claimed = optional_size(draft.settings, "vocab_size")
    if claimed is not None and embedding_rows is None and (head_rows is None or has_offsets):
        _check_claimed_vocabulary(draft, claimed, target.vocab_size, has_offsets)


def _rows(draft: DraftDescription, name: str) -> int | None:
    return next(iter(draft.shapes[name]), 0) if name in draft.shapes else None


def _check_rows(draft: DraftDescription, name: str, found: int, expected: int) -> None:
    if found < expected:
        missing_map = " and the file has no d2t" if name == "lm_head.weight" else ""
        raise ModelError(
            f"{draft.layout.spell(name)} of the draft has {found} rows, the target's vocabulary has {expected}{missing_map}",
            "this draft was made for another vocabulary",
        )
    if found - expected >= _MAX_PADDING_ROWS:
        raise ModelError(
            f"{draft.layout.spell(name)} of the draft has {found} rows, the target's vocabulary has {expected}: too many to be padding",
            "this draft was made for another vocabulary",
        )


def _check_claimed_vocabulary(draft: DraftDescription, claimed: int, expected: int, has_offsets: bool) -> None:
    """No tensor shows the size, so the config's word counts. With a map, a target padded further than the draft knows is harmless."""
    is_smaller = claimed < expected and not (has_offsets and expected - claimed < _MAX_PADDING_ROWS)
    if is_smaller or claimed - expected >= _MAX_PADDING_ROWS:
        raise ModelError(
            f"{draft.settings.source} has vocab_size {claimed}, the target's vocabulary has {expected}",
            "this draft was made for another vocabulary",
        )


def _check_claimed_draft_vocabulary(draft: DraftDescription, target: TargetConfig, token_map: torch.Tensor | None) -> None:
    for key in ("draft_vocab_size", "truncated_vocab_size"):
        claimed = optional_size(draft.settings, key)
        if claimed is None or draft.layout.algorithm == "EAGLE":
            continue
        if token_map is not None and claimed != len(token_map):
            raise ModelError(f"{draft.settings.source} has {key} {claimed}, but d2t has {len(token_map)} entries")
        if token_map is None and claimed < target.vocab_size:
            raise ModelError(f"{draft.settings.source} has {key} {claimed} below the target's {target.vocab_size}, but the file has no d2t")


def _head_source(draft: DraftDescription, config: DraftConfig, target: TargetConfig, token_map: torch.Tensor | None) -> HeadSource:
    if "lm_head.weight" in draft.shapes:
        return "own"
    if config.algorithm == "EAGLE3" and token_map is not None:
        raise ModelError(
            f"{draft.path}: the draft has a vocabulary of {len(token_map)} ids (d2t) but no lm_head.weight; "
            f"the target's head of {target.vocab_size} rows cannot stand in"
        )
    is_tied = draft.settings.values.get("tie_word_embeddings") is True
    if config.algorithm == "EAGLE3" and is_tied and "embed_tokens.weight" in draft.shapes:
        return "own embedding"
    if config.layer.hidden_size != target.hidden_size:
        raise ModelError(
            f"{draft.path}: lm_head.weight is missing, and the target's head (hidden size {target.hidden_size}) "
            f"does not fit the draft's hidden size {config.layer.hidden_size}"
        )
    return "target"


# ---- tensors ------------------------------------------------------------------------------------------------------


def _check_tensors(draft: DraftDescription, config: DraftConfig) -> None:
    """Every tensor of the file has a place in the model and every place its tensor, both of one shape."""
    hidden_size = config.layer.hidden_size
    if "embed_tokens.weight" not in draft.shapes and hidden_size != config.target_hidden_size:
        raise ModelError(
            f"{draft.path}: embed_tokens.weight is missing, and the target's embedding (hidden size {config.target_hidden_size}) "
            f"does not fit the draft's hidden size {hidden_size}"
        )
    expected = {name: tuple(view.shape) for name, view in shape_only_model(config).checkpoint_views().items()}
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if name in draft.shapes:
            expected[name] = (_rows(draft, name) or 0, hidden_size)
    for name, shape in expected.items():
        if name not in draft.shapes:
            raise ModelError(f"{draft.path}: tensor {draft.layout.spell(name)} {list(shape)} is missing from the draft")
        if draft.shapes[name] != shape:
            raise ModelError(f"{draft.layout.spell(name)}: expected shape {list(shape)}, found {list(draft.shapes[name])} ({draft.path})")
        if not draft.dtypes[name].is_floating_point or draft.dtypes[name].itemsize < 2:
            raise ModelError(
                f"{draft.layout.spell(name)} is stored as {draft.dtypes[name]}, expected an unquantized floating type ({draft.path})",
                "use the unquantized draft",
            )
    unused = [draft.layout.spell(name) for name in draft.shapes if name not in expected and name not in _FREE_TENSORS]
    if unused:
        kind = ALGORITHM_TITLES[config.algorithm]
        raise ModelError(f"{draft.path}: tensor {unused[0]} has no place in an {kind} draft" + _and_more(len(unused) - 1))


def _and_more(count: int) -> str:
    return f" (and {count} more)" if count > 0 else ""


def shape_only_model(config: DraftConfig) -> DraftModel:
    """The draft with weights that have shapes but no memory; embedding and head are empty."""
    nothing = torch.empty(0, config.layer.hidden_size, device="meta")
    tables = RopeTables(nothing, nothing)
    return DRAFT_CLASSES[config.algorithm](config, tables, nothing, nothing, None, torch.float32, "meta")


# ---- tokenizers ---------------------------------------------------------------------------------------------------


def _check_tokenizers(draft_path: Path, target_path: Path) -> None:
    """Two tokenizers that give one id to different texts cannot belong to a pair, whatever their sizes."""
    target_folder = target_path if target_path.is_dir() else target_path.parent
    draft_file, target_file = draft_path / "tokenizer.json", target_folder / "tokenizer.json"
    if not (draft_file.is_file() and target_file.is_file()):
        return
    draft_tokens, target_tokens = _tokens_by_id(draft_file), _tokens_by_id(target_file)
    clashes = [number for number, token in draft_tokens.items() if target_tokens.get(number, token) != token]
    if clashes:
        number = min(clashes)
        raise ModelError(
            f"draft and target have different tokenizers: id {number} is {draft_tokens[number]!r} in {draft_file} "
            f"and {target_tokens[number]!r} in {target_file} ({len(clashes)} ids differ)",
            "this draft was made for another vocabulary; remove its tokenizer.json if you are sure that it is not the draft's",
        )


def _tokens_by_id(path: Path) -> dict[int, str]:
    """The tokens of the model part of a tokenizer.json; added tokens are left out, since reserved ones are renamed at will."""
    try:
        model = json.loads(path.read_text(encoding="utf-8"))["model"]
        vocabulary = model["vocab"]
        if isinstance(vocabulary, list):  # unigram models list pairs of token and score
            return {number: entry[0] for number, entry in enumerate(vocabulary)}
        return {number: token for token, number in vocabulary.items()}
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise ModelError(f"{path} is not a tokenizer file that can be read", "remove it or restore it") from None


# ---- remarks ------------------------------------------------------------------------------------------------------


def _warnings(draft: DraftDescription, config: DraftConfig) -> tuple[str, ...]:
    found = []
    values = draft.settings.values
    if config.algorithm == "EAGLE3" and draft.settings.is_speculators and "norm_before_residual" not in values:
        found.append("draft config has no norm_before_residual, false is assumed (vLLM assumes true)")
    if config.norm_output and not draft.settings.is_speculators:
        found.append(
            "draft says norm_output, which older SpecForge files mean differently: compare the accept length with false by override"
        )
    return tuple(found)
