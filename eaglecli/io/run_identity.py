"""What makes a run the same run: its input, its models, and every setting that can change text. Kept in the manifest."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eaglecli.config import DEFAULT, PATH_SETTINGS, SETTINGS, GenerateSettings
from eaglecli.errors import UserError
from eaglecli.io.dataset_rows import HUB_PREFIX
from eaglecli.io.fingerprint import InputFile, fingerprint_input, fingerprint_model, name_input
from eaglecli.io.input_sources import can_be_read_again

START_ANEW = "use --overwrite to start anew, or name another directory with -o"
MAX_SHOWN_DIFFERENCES = 8


@dataclass(frozen=True)
class RunIdentity:
    """Plain JSON values, so that one that was read back compares equal. `models`: fingerprint by role, empty if none was looked at."""

    input: tuple[InputFile, ...]
    settings: Mapping[str, Any]
    models: Mapping[str, str | None]

    def to_json(self) -> dict[str, Any]:
        """As it is kept in the manifest."""
        return {"input": [asdict(file) for file in self.input], "settings": dict(self.settings), "models": dict(self.models)}


def identity_from_json(document: Mapping[str, Any]) -> RunIdentity:
    """The reverse of `to_json`. Raises KeyError or TypeError for what is no identity."""
    files = tuple(InputFile(**file) for file in document["input"])
    return RunIdentity(files, dict(document["settings"]), dict(document["models"]))


def settings_that_change_text(settings: GenerateSettings, speculation: str) -> dict[str, Any]:
    """Values, not origins: who gave one does not matter. `speculation` is the triple as chosen, in words.

    A cap that nobody gave counts as another one than the same number given: it shrinks to the room left.
    """
    values = {name: getattr(settings, name) for name, item in SETTINGS.items() if item.metadata["changes_text"]}
    if values["dtype"] == "auto":
        values["dtype"] = "float32" if settings.device == "cpu" else "bfloat16"
    if settings.origin("max_new_tokens") == DEFAULT:
        values["max_new_tokens"] = f"{settings.max_new_tokens}, or the room left"
    for name in PATH_SETTINGS:
        if values.get(name) is not None:
            values[name] = fingerprint_model(Path(values[name]))
    return {**{name: _plain(value) for name, value in values.items()}, "speculation": speculation}


def compare_runs(earlier: RunIdentity, now: RunIdentity, input_continues: bool) -> list[str]:
    """The differences in words; none when `now` may take `earlier` up again."""
    differences = []
    if not input_continues:
        differences.append("input: its content was changed, other than by lines added at its end")
    for name in dict.fromkeys((*earlier.settings, *now.settings)):
        before, after = earlier.settings.get(name), now.settings.get(name)
        if name == "limit":
            if not _is_raised(before, after):
                differences.append(f"limit: {_shown(before)} -> {_shown(after)} (it may only be raised)")
        elif before != after:
            differences.append(f"{name}: {_shown(before)} -> {_shown(after)}")
    if earlier.models and now.models:
        differences += [f"{role}: another model" for role, value in now.models.items() if earlier.models.get(role) != value]
    return differences


def look_at_input(sources: Sequence[str], earlier: Sequence[InputFile] = ()) -> tuple[tuple[InputFile, ...], bool]:
    """The sources as they are, and whether they are the earlier ones, grown at most at the end of the last one or by more sources.

    Of a hub stream the name counts. What came from a pipe cannot be had again: it never continues.
    """
    seen = [_look_at(name, earlier[number] if number < len(earlier) else None) for number, name in enumerate(sources)]
    unchanged = all(file.sha256 == before.sha256 for (file, _), before in zip(seen, earlier[:-1], strict=False))
    continues = len(seen) >= len(earlier) and unchanged and all(grown for _, grown in seen)
    return tuple(file for file, _ in seen), continues


def _look_at(name: str, earlier: InputFile | None) -> tuple[InputFile, bool]:
    if can_be_read_again(name):
        return fingerprint_input(Path(name), earlier)
    return name_input(name), earlier is None or (earlier.name == name and name.startswith(HUB_PREFIX))


def refuse_other_run(output: Path, differences: Sequence[str]) -> UserError:
    """The sentence for a directory that holds another run."""
    shown = "; ".join(differences[:MAX_SHOWN_DIFFERENCES])
    more = f"; and {len(differences) - MAX_SHOWN_DIFFERENCES} more" if len(differences) > MAX_SHOWN_DIFFERENCES else ""
    return UserError(f"--output {output} holds a run that differs: {shown}{more}", START_ANEW)


def _is_raised(before: int | None, after: int | None) -> bool:
    return after is None or (before is not None and after >= before)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)[:60]
