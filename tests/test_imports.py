"""What importing and asking for help may load: no torch, no transformers."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "datasets", "triton", "numpy")


def loaded_after(code: str) -> set[str]:
    report = f"import sys; {code}; print('LOADED', *[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True)
    return set(done.stdout.rsplit("LOADED", 1)[1].split())


@pytest.mark.parametrize("module", ["cli", "config", "errors"])
def test_importing_a_light_module_loads_nothing_heavy(module):
    assert loaded_after(f"import eaglecli.{module}") == set()


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["generate", "--help"], ["bench", "--help"]])
def test_help_and_version_load_nothing_heavy(arguments):
    code = (
        f"from typer.testing import CliRunner; from eaglecli.cli import app; assert CliRunner().invoke(app, {arguments!r}).exit_code == 0"
    )
    assert loaded_after(code) == set()


def test_io_loads_no_torch():
    modules = (
        "accept_statistics console json_record lines prefetch progress prompts record_ids results run_directory run_report scan tokenizer"
        " formats input_sources prompt_encoder gguf_tokenizer openai_batch record_choice field_mapping"
    )
    assert loaded_after("; ".join(f"import eaglecli.io.{name}" for name in modules.split())) <= {"numpy"}


def test_the_bookkeeping_of_the_engine_loads_no_torch():
    assert "torch" not in loaded_after("import eaglecli.engine.request, eaglecli.engine.pages, eaglecli.engine.scheduler")
