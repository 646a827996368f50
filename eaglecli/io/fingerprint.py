"""Fingerprints of files: whole for the input and for small files, by samples for weights, so that a model costs milliseconds."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from eaglecli.errors import UserError

CHUNK_BYTES = 1 << 20
WHOLE_UP_TO_BYTES = 4 << 20
NUM_SAMPLES, SAMPLE_BYTES = 16, 1 << 16
MODEL_SUFFIXES = (".json", ".safetensors", ".bin", ".gguf", ".jinja", ".model", ".txt")
COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")


@dataclass(frozen=True)
class InputFile:
    """One input file as a run saw it. `sha256` of all its bytes."""

    name: str
    num_bytes: int
    sha256: str


def fingerprint_model(path: Path) -> str:
    """Hash of a checkpoint's folder or file: names and sizes of its files, small ones whole, large ones by evenly spaced samples."""
    if path.is_dir():
        return _fingerprint_folder(path, MODEL_SUFFIXES)
    return _fingerprint_files([("", path)])


def _fingerprint_folder(path: Path, suffixes: Sequence[str] = ()) -> str:
    """Of the files in a folder, or of those with the given suffixes."""
    files = sorted(file for file in path.iterdir() if file.is_file() and (not suffixes or file.suffix in suffixes))
    return _fingerprint_files([(file.name, file) for file in files])


def _fingerprint_files(files: Iterable[tuple[str, Path]]) -> str:
    digest = hashlib.sha256()
    for name, file in files:
        num_bytes = file.stat().st_size
        digest.update(f"{name} {num_bytes}\n".encode("utf-8", "backslashreplace"))
        for part in _sampled(file, num_bytes):
            digest.update(part)
    return digest.hexdigest()


def _sampled(file: Path, num_bytes: int) -> Iterator[bytes]:
    with file.open("rb") as stream:
        if num_bytes <= WHOLE_UP_TO_BYTES:
            yield stream.read()
            return
        for number in range(NUM_SAMPLES):
            stream.seek((num_bytes - SAMPLE_BYTES) * number // (NUM_SAMPLES - 1))
            yield stream.read(SAMPLE_BYTES)


def name_input(name: str) -> InputFile:
    """A source that cannot be read twice: its name stands for it."""
    return InputFile(name, 0, "")


def fingerprint_input(path: Path, earlier: InputFile | None = None) -> tuple[InputFile, bool]:
    """The file as it is now, and whether it is `earlier` with nothing, or whole lines, added at its end.

    Compressed files and folders are compared as they are: what was added to one cannot be told from a change. Raises UserError.
    """
    if path.is_dir():
        now = InputFile(str(path), 0, _fingerprint_folder(path))
        return now, earlier is None or earlier.sha256 == now.sha256
    digest, prefix_sha256 = hashlib.sha256(), None
    boundary = 0 if earlier is None else earlier.num_bytes
    num_bytes, around = 0, b""
    try:
        with path.open("rb") as stream:
            is_compressed = stream.read(4).startswith(COMPRESSED)
            stream.seek(0)
            while data := stream.read(boundary - num_bytes if 0 < boundary - num_bytes < CHUNK_BYTES else CHUNK_BYTES):
                if num_bytes == boundary:
                    around += data[:1]
                digest.update(data)
                num_bytes += len(data)
                if num_bytes == boundary:
                    prefix_sha256, around = digest.copy().hexdigest(), data[-1:]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}", "check the path given to --input") from error
    now = InputFile(str(path), num_bytes, digest.hexdigest())
    if earlier is None or earlier.sha256 == now.sha256:
        return now, True
    is_prefix = boundary == 0 or prefix_sha256 == earlier.sha256
    return now, is_prefix and not is_compressed and (boundary == 0 or b"\n" in around)
