"""The command line: options, help, and the way from an exception to a sentence and an exit code.

Commands are imported when they run, so that help and version need neither torch nor transformers.
"""

import json as json_module
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from eaglecli import __version__
from eaglecli.errors import ExitCode, UserError

if TYPE_CHECKING:
    from eaglecli.config import GenerateSettings

EXIT_CODES = """Exit codes: 0 all done · 1 internal error · 2 usage or configuration · 3 some records failed · 4 no record succeeded ·
5 model or draft cannot be loaded or do not fit · 6 out of memory · 130 / 143 interrupted"""
PRESENTATION = ("config", "print_config", "json", "quiet", "no_color", "debug")  # options that are no settings of the run

app = typer.Typer(
    name="eaglecli",
    help="Offline batch generation with EAGLE speculative decoding: the target's own text, sooner.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


# What other tools call the same thing. Kept out of the option declarations so that help shows one name per option.
ALIASES = {
    "model": "target",
    "model-path": "target",
    "draft-model": "draft",
    "speculative-draft-model": "draft",
    "speculative-draft-model-path": "draft",
    "ea-model-path": "draft",
    "tokenizer": "tokenizer-path",
    "input-file": "input",
    "output-path": "output",
    "seed": "random-seed",
    "max-tokens": "max-new-tokens",
    "max-model-len": "context-length",
    "max-num-seqs": "max-running-requests",
    "block-size": "page-size",
}
ALIAS_NOTE = "Also understood: " + ", ".join(f"--{alias}" for alias in ALIASES) + "; and every option with _ for -."


def _any_spelling(name: str) -> str:
    """--top_p is --top-p, --model is --target. Choices pass through here too: none of them is an alias."""
    dashed = name.replace("_", "-")
    return ALIASES.get(dashed, dashed)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"eaglecli {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)] = False,
) -> None:
    """Offline batch generation with EAGLE speculative decoding: the target's own text, sooner."""


def _option(panel: str, help_text: str, *names: str, metavar: str | None = None, default: str | None = None) -> Any:
    shown = help_text if default is None else f"{help_text} Default: {default}."
    return typer.Option(*names, help=shown, rich_help_panel=panel, metavar=metavar, show_default=False)


MODEL, INPUT, OUTPUT, SAMPLING = "Models", "Input", "Output", "Sampling"
SPECULATION, ENGINE, RUN, DEBUG = "Speculation", "Engine", "Run control", "Debug"


@app.command(context_settings={"token_normalize_func": _any_spelling}, epilog=f"{ALIAS_NOTE}\n\n{EXIT_CODES}")
def generate(
    ctx: typer.Context,
    input: Annotated[str | None, _option(INPUT, "JSON lines, each with `prompt` or `messages`.", "-i", "--input", metavar="FILE")] = None,
    input_format: Annotated[
        Literal["auto", "prompt", "messages"], _option(INPUT, "Which field is read.", "--input-format", default="auto")
    ] = "auto",
    limit: Annotated[int | None, _option(INPUT, "Take this many records.", "--limit")] = None,
    offset: Annotated[int, _option(INPUT, "Skip this many records first.", "--offset", default="0")] = 0,
    apply_chat_template: Annotated[
        bool,
        _option(
            INPUT,
            "Make a `prompt` one user message.",
            "--apply-chat-template/--no-apply-chat-template",
            default="yes, if there is a template",
        ),
    ] = True,
    output: Annotated[
        str | None,
        _option(OUTPUT, "Run directory.", "-o", "--output", metavar="DIR", default="runs/<target>-<input>"),
    ] = None,
    overwrite: Annotated[bool, _option(OUTPUT, "Start anew in a directory that holds an earlier run.", "--overwrite")] = False,
    ordered: Annotated[
        bool, _option(OUTPUT, "Put the results in input order at the end.", "--ordered/--unordered", default="ordered")
    ] = True,
    target: Annotated[
        str | None,
        _option(MODEL, "Target: folder, GGUF file, hub id or smollm2-135m.", "--target", metavar="MODEL", default="from --config"),
    ] = None,
    draft: Annotated[
        str | None,
        _option(
            MODEL,
            "EAGLE draft: folder or hub id; `none` is plain decoding.",
            "--draft",
            metavar="MODEL",
            default="from --config, else none",
        ),
    ] = None,
    tokenizer_path: Annotated[str | None, _option(MODEL, "Tokenizer, if not the target's.", "--tokenizer-path", metavar="MODEL")] = None,
    revision: Annotated[str | None, _option(MODEL, "Revision of the target on the hub.", "--revision")] = None,
    local_files_only: Annotated[bool, _option(MODEL, "Never go to the network.", "--local-files-only")] = False,
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"],
        _option(MODEL, "`dummy`: random weights for a config alone.", "--load-format", default="auto"),
    ] = "auto",
    temperature: Annotated[
        float, _option(SAMPLING, "0 is greedy.", "--temperature", default="0, or the model's generation_config if that samples")
    ] = 0.0,
    top_p: Annotated[float, _option(SAMPLING, "Nucleus: 0 < p <= 1.", "--top-p", default="1")] = 1.0,
    top_k: Annotated[int, _option(SAMPLING, "Candidates kept; -1 keeps all.", "--top-k", default="-1")] = -1,
    min_p: Annotated[float, _option(SAMPLING, "Least share of the best candidate's probability.", "--min-p", default="0")] = 0.0,
    random_seed: Annotated[int, _option(SAMPLING, "Seed of the run; each record's own follows from it.", "--random-seed", default="0")] = 0,
    max_new_tokens: Annotated[
        int, _option(SAMPLING, "Longest answer in tokens.", "--max-new-tokens", default="512, or the room left")
    ] = 512,
    stop_token_ids: Annotated[
        list[str] | None, _option(SAMPLING, "Token ids that end an answer too (repeat, or 1,2).", "--stop-token-ids", metavar="IDS")
    ] = None,
    ignore_eos: Annotated[bool, _option(SAMPLING, "Go on after an end-of-text token.", "--ignore-eos")] = False,
    speculative_algorithm: Annotated[
        Literal["EAGLE", "EAGLE3", "NONE"] | None,
        _option(SPECULATION, "What the draft must be.", "--speculative-algorithm", default="as the checkpoint says"),
    ] = None,
    speculative_num_steps: Annotated[int | None, _option(SPECULATION, "Depth of the tree.", "--speculative-num-steps", default="5")] = None,
    speculative_eagle_topk: Annotated[
        int | None, _option(SPECULATION, "Branches per node.", "--speculative-eagle-topk", default="1")
    ] = None,
    speculative_num_draft_tokens: Annotated[
        int | None, _option(SPECULATION, "Nodes verified, the root counted.", "--speculative-num-draft-tokens", default="steps + 1")
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, _option(SPECULATION, "K: a chain of K tokens.", "--num-speculative-tokens", metavar="K")
    ] = None,
    speculative_token_map: Annotated[
        str | None, _option(SPECULATION, "Reduced vocabulary of an EAGLE-2 draft.", "--speculative-token-map", metavar="FILE")
    ] = None,
    draft_config_overrides: Annotated[
        str | None, _option(SPECULATION, "Keys of the draft's config to replace.", "--draft-config-overrides", metavar="JSON")
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        _option(ENGINE, "Number format of weights and cache.", "--dtype", default="auto: float32 on cpu, bfloat16 on cuda"),
    ] = "auto",
    device: Annotated[Literal["auto", "cpu", "cuda"], _option(ENGINE, "Where to run.", "--device", default="auto")] = "auto",
    context_length: Annotated[
        int | None, _option(ENGINE, "Most tokens of prompt and answer.", "--context-length", default="the target's")
    ] = None,
    max_running_requests: Annotated[int, _option(ENGINE, "Requests that run at a time.", "--max-running-requests", default="16")] = 16,
    max_total_tokens: Annotated[
        int | None, _option(ENGINE, "Size of the KV cache in tokens.", "--max-total-tokens", default="from memory")
    ] = None,
    mem_fraction_static: Annotated[
        float, _option(ENGINE, "Share of GPU memory for weights and KV cache.", "--mem-fraction-static", default="0.85")
    ] = 0.85,
    chunked_prefill_size: Annotated[int, _option(ENGINE, "Most prompt tokens in one step.", "--chunked-prefill-size", default="512")] = 512,
    page_size: Annotated[int, _option(ENGINE, "Tokens per cache page.", "--page-size", default="16")] = 16,
    config: Annotated[
        str | None,
        _option(
            RUN, "YAML file, or the name of a shipped one.", "--config", metavar="FILE", default="smollm2-135m, if no --target is given"
        ),
    ] = None,
    print_config: Annotated[bool, _option(RUN, "Print every setting with its origin, and exit.", "--print-config")] = False,
    on_error: Annotated[
        Literal["record", "stop"],
        _option(RUN, "A bad record is written to errors.jsonl, or stops the run.", "--on-error", default="record"),
    ] = "record",
    progress: Annotated[
        Literal["auto", "bar", "plain", "none"], _option(RUN, "How progress is shown on stderr.", "--progress", default="auto")
    ] = "auto",
    json: Annotated[bool, _option(RUN, "Print the statistics as one JSON object on stdout.", "--json")] = False,
    quiet: Annotated[bool, _option(RUN, "Say nothing but warnings and errors.", "-q", "--quiet")] = False,
    no_color: Annotated[bool, _option(RUN, "No colours (NO_COLOR does the same).", "--no-color")] = False,
    debug: Annotated[bool, _option(DEBUG, "Show tracebacks.", "--debug")] = False,
) -> None:
    """Generate the target's text for every prompt of a JSON-lines file.

    [bold]eaglecli generate -i prompts.jsonl -o runs/first[/bold]

    [bold]eaglecli generate --target meta-llama/Llama-3.1-8B-Instruct --draft yuhuili/EAGLE3-LLaMA3.1-Instruct-8B -i prompts.jsonl[/bold]

    Writes generations.jsonl, errors.jsonl, stats.json, manifest.json and log.txt into the run directory.
    """
    console = _console(quiet, no_color, debug)
    _exit(console, lambda: _generate(ctx.params, _given_names(ctx), console))


def _generate(params: Mapping[str, Any], given_names: set[str], console: Any) -> ExitCode:
    from eaglecli.commands.generate import generate as run
    from eaglecli.commands.generate import resolve

    given = {name: params[name] for name in given_names if name not in PRESENTATION}
    settings = resolve(given, params["config"], console)
    if params["print_config"]:
        _print_settings(settings, as_json=params["json"])
        return ExitCode.OK
    result = run(settings, console, ["eaglecli", *sys.argv[1:]])
    if params["json"]:
        typer.echo(json_module.dumps(result.document, default=str))
    return result.exit_code


def _given_names(ctx: typer.Context) -> set[str]:
    """Options that stand on the command line, whatever their value."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def _print_settings(settings: "GenerateSettings", as_json: bool) -> None:
    described = settings.described()
    if as_json:
        typer.echo(json_module.dumps({"schema_version": 1, "settings": described}))
        return
    for name, item in described.items():
        typer.echo(f"{name}: {json_module.dumps(item['value'], ensure_ascii=False)}  # {item['origin']}")


def _console(quiet: bool, no_color: bool, debug: bool) -> Any:
    from eaglecli.io.console import Console

    plain = no_color or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return Console(quiet=quiet, color=not plain, debug=debug)


def _exit(console: Any, command: Callable[[], ExitCode]) -> None:
    """Runs a command body and leaves the process with its code: one sentence on stderr, a traceback only with --debug."""
    code = ExitCode.INTERNAL
    try:
        code = command()
    except UserError as error:
        console.trace(error)
        console.error(error.message, error.hint)
        code = error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left: nothing more can be said there
        code = ExitCode.OK
    except KeyboardInterrupt:
        console.error("interrupted before anything was generated")
        code = ExitCode.INTERRUPTED
    except Exception as error:
        console.trace(error)
        console.error(f"internal error: {type(error).__name__}: {error}", "run again with --debug and report the traceback")
    raise typer.Exit(int(code))


def main() -> None:
    """Console script."""
    app()
