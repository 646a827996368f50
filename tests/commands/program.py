"""Helpers for tests of whole runs: the program in this process, and models that are scripted."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner

from eaglecli.cli import app
from eaglecli.commands._open_engine import OpenedEngine
from eaglecli.commands.generate import generate as run_generate
from eaglecli.config import resolve_settings
from eaglecli.engine.request import Completion
from eaglecli.engine.settings import PLAIN
from eaglecli.io.console import Console
from eaglecli.io.tokenizer import load_tokenizer
from tests.fixtures import END_OF_TURN_ID, Pair


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def write_records(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


class Program:
    """`eaglecli generate` on one pair of models and one input file, into one directory."""

    def __init__(self, pair: Pair, source: Path, output: Path) -> None:
        self.pair, self.source, self.output = pair, source, output

    def arguments(self, *more: str) -> list[str]:
        models = ["--target", str(self.pair.target_dir), "--draft", str(self.pair.draft_dir)]
        fixed = ["-i", str(self.source), "-o", str(self.output), "--device", "cpu", "--context-length", "512"]
        return ["generate", *models, *fixed, "--max-new-tokens", "4", *more]

    def run(self, *more: str) -> Any:
        return CliRunner().invoke(app, self.arguments(*more))

    def lines(self, name: str = "generations.jsonl") -> list[dict]:
        return lines(self.output / name)

    def document(self, name: str) -> dict:
        return json.loads((self.output / name).read_text())


class ScriptedEngine:
    """Answers each request by what a function makes of it."""

    refusal = {}.get  # None of whatever it is asked; a helper process can have it without importing this file

    def __init__(self, respond: Callable[[Any], Completion]) -> None:
        self.respond = respond

    def generate(self, requests):
        for request in requests:
            yield self.respond(request)

    def summary(self):
        return {}


class ScriptedModels:
    """A ModelSource with a real tokenizer and a scripted engine; `on_load` runs where weights would be read."""

    generation_config: dict = {}

    def __init__(self, folder: Path, respond: Callable[[Any], Completion], on_load: Callable[[], None] = lambda: None) -> None:
        self.folder, self.respond, self.on_load = folder, respond, on_load

    def fingerprints(self):
        return {}

    def load_tokenizer(self):
        return load_tokenizer(self.folder)

    def open_engine(self, settings, needs):
        self.on_load()
        return OpenedEngine(ScriptedEngine(self.respond), 512, (END_OF_TURN_ID,), PLAIN, 16, {}, ())


def answered(request: Any, text: bytes = b"ok") -> Completion:
    return Completion(request, np.frombuffer(text, np.uint8).astype(np.int32), "length")


def scripted_run(folder: Path, models: ScriptedModels, num_records: int = 3, device: str = "cpu", **given: Any) -> Any:
    """A run of `num_records` prompts into folder/run. On "cuda" all but the scripted engine works as it would there."""
    source = folder / "input.jsonl"
    if not source.exists():
        write_records(source, [{"prompt": f"p{number}"} for number in range(num_records)])
    settings = resolve_settings({"input": str(source), "output": str(folder / "run"), "target": "t", **given}, None, lambda _: device)
    return run_generate(settings, Console(quiet=True), ["eaglecli"], lambda _: models)
