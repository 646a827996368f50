"""The direction of imports, read from the sources: docs/architecture.md as a table."""

import ast
import tomllib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "eaglecli"
MAY_IMPORT = {
    "errors": set(),
    "speculation_table": set(),
    "config": {"errors", "speculation_table"},
    "kernels": {"kernels"},
    "models": {"models", "kernels", "errors"},
    "io": {"io", "config", "errors"},
    "engine": {"engine", "models", "kernels", "errors"},
    "training": {"training", "engine", "models", "kernels", "errors"},
    "verification": {"verification", "engine", "models", "kernels", "errors"},
    "commands": {"commands", "training", "verification", "engine", "models", "kernels", "io", "config", "speculation_table", "errors"},
    "cli": {"commands", "config", "io", "errors"},
}
WITHOUT_TORCH = [
    "errors.py",
    "speculation_table.py",
    "config.py",
    "cli.py",
    "engine/request.py",
    "engine/request_limits.py",
    "engine/pages.py",
    "engine/scheduler.py",
    "engine/settings.py",
]
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path.name not in ("__init__.py", "__main__.py"))


def imported_modules(path: Path) -> set[str]:
    """Dotted names that a file imports anywhere, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def layer(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_from_the_layers_below_it(path):
    ours = {name.split(".")[1] for name in imported_modules(path) if name.startswith("eaglecli.")}
    assert ours - {"__version__"} <= MAY_IMPORT[layer(path)]


@pytest.mark.parametrize("path", [path for path in SOURCES if layer(path) == "commands"], ids=lambda path: path.name)
def test_commands_do_not_import_one_another(path):
    """Files whose name begins with an underscore are shared by commands, and are none themselves."""
    ours = {name.split(".")[2] for name in imported_modules(path) if name.startswith("eaglecli.commands.")}
    assert {name for name in ours if not name.startswith("_")} == set()


@pytest.mark.parametrize("name", [*WITHOUT_TORCH, *(f"io/{path.name}" for path in SOURCES if layer(path) == "io")])
def test_a_file_of_bookkeeping_does_not_know_torch(name):
    assert "torch" not in {module.split(".")[0] for module in imported_modules(PACKAGE / name)}


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if layer(path) in ("engine", "kernels", "models", "training")], ids=lambda path: path.name
)
def test_no_environment_variable_changes_the_engine(path):
    source = path.read_text(encoding="utf-8")
    assert "environ" not in source
    assert "getenv" not in source


def test_ci_runs_the_test_command_of_the_readme():
    root = PACKAGE.parent
    command = (root / ".ci" / "run").read_text().strip().splitlines()[-1]
    assert command in (root / "README.md").read_text()


def test_every_package_is_in_the_wheel():
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {f"eaglecli.{path.parent.name}" for path in PACKAGE.glob("*/__init__.py")}
    assert found <= set(settings["packages"])
