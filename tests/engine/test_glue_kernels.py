"""The engine on the compiled kernels around the models, interpreted: what the GPU runs, wired as the GPU runs it."""

import importlib
import inspect

import pytest

from tests.engine.harness import LoadedPair, Triple, make_engine, mixed_requests, outcomes, run

CALLERS = (
    "engine.draft", "engine.verify", "engine.extend", "engine.iteration", "engine.prefill", "models.target", "models.eagle", "models.eagle3"
)  # fmt: skip
GLUE = {
    "live_rows", "build_tree", "draft_step_inputs", "draft_input", "draft_topk", "verify_inputs", "choose_tokens", "commit_run",
    "create_extend_spec_info", "gather_norm", "keep_last",
}  # fmt: skip


def take_triton_kernels(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Make the engine and its models launch the Triton side of every glue kernel; the files they are from."""
    taken = set()
    for caller in (importlib.import_module(f"eaglecli.{name}") for name in CALLERS):
        for name, function in inspect.getmembers(caller, inspect.isfunction):
            home = importlib.import_module(function.__module__)
            file = home.__name__.rpartition(".")[2]
            if file in GLUE and hasattr(home, f"{name}_triton"):
                monkeypatch.setattr(caller, name, getattr(home, f"{name}_triton"))
                taken.add(file)
    return taken


@pytest.mark.parametrize(("name", "triple"), [("e3", (3, 2, 6)), ("twin", (3, 1, 4)), ("twin", None)], ids=["tree", "chain", "plain"])
def test_text_and_accept_lists_are_those_of_the_references(
    name: str, triple: Triple | None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair: LoadedPair = request.getfixturevalue(name)

    def answers() -> dict:
        engine = make_engine(pair.target, pair.draft, triple, max_running_requests=2, graph_sizes=(2,))
        return outcomes(run(engine, mixed_requests(2, seed=4, max_prompt=12, max_cap=7)))

    expected = answers()
    assert take_triton_kernels(monkeypatch) == GLUE
    assert answers() == expected
