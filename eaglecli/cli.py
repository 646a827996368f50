"""The command line: options, help, and the way from an exception to a sentence and an exit code.

Commands are imported when they run, so that help and version need neither torch nor transformers.
"""

import json as json_module
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer

from eaglecli import __version__
from eaglecli.errors import ExitCode, UserError
from eaglecli.io.narrow_help import ReadableHelpCommand, ReadableHelpGroup
from eaglecli.io.process_end import leave_process
from eaglecli.io.signals import Interrupted, ending_at_once

if TYPE_CHECKING:
    from eaglecli.config import GenerateSettings

EXIT_CODES = """Exit codes: 0 all done · 1 internal error · 2 usage or configuration · 3 some records failed · 4 no record succeeded ·
5 model or draft cannot be loaded or do not fit · 6 out of memory, or graphs cannot be captured · 7 a check failed ·
130 / 143 interrupted"""
# Options that are no settings of the run: they change what is shown, or whether it runs at all.
PRESENTATION = ("config", "print_config", "dry_run", "json", "quiet", "verbose", "no_color", "log_file", "debug")

app = typer.Typer(
    name="eaglecli",
    cls=ReadableHelpGroup,
    help="Offline batch generation with EAGLE speculative decoding: the target's own text, sooner.",
    epilog=EXIT_CODES,
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
    "min-tokens": "min-new-tokens",
    "max-model-len": "context-length",
    "max-num-seqs": "max-running-requests",
    "block-size": "page-size",
}
ALIAS_NOTE = "Also understood: " + ", ".join(f"--{alias}" for alias in ALIASES) + "; and every option with _ for -."


def _any_spelling(name: str) -> str:
    """--top_p is --top-p, --model is --target. Choices pass through here too: none of them is an alias."""
    dashed = name.replace("_", "-")
    return ALIASES.get(dashed, dashed)


MANY_VALUES = {"--cuda-graph-bs": ",", "--batch-size": ",", "--config-list": ";"}  # and what divides their values once they are one


def join_values(arguments: Sequence[str]) -> list[str]:
    """The values that follow an option of `MANY_VALUES`, up to what is no number, as one: `--batch-size 1 2 4` is `--batch-size 1,2,4`."""
    joined: list[str] = []
    for argument in arguments:
        is_number = argument.strip(" ,").replace(",", "").isdecimal()
        divider = MANY_VALUES.get(joined[-2].replace("_", "-")) if is_number and len(joined) > 1 else None
        if divider:
            joined[-1] += f"{divider}{argument}"
        else:
            joined.append(argument)
    return joined


class ManyValuesCommand(ReadableHelpCommand):
    """A command whose options of `MANY_VALUES` take values until the next option, as their users know them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See `join_values`."""
        return super().parse_args(ctx, join_values(args))


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="With --version: torch, CUDA, GPU and commit too, as a bug report needs them.")
    ] = False,
) -> None:
    """Offline batch generation with EAGLE speculative decoding: the target's own text, sooner."""
    if version:
        _exit(_console(), lambda: _show_version(verbose))
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit(int(ExitCode.USAGE))


def _show_version(verbose: bool) -> ExitCode:
    typer.echo(f"eaglecli {__version__}")
    if verbose:
        from eaglecli.commands._environment import describe_environment

        for name, value in describe_environment().items():
            typer.echo(f"{name}: {value or 'none'}")
    return ExitCode.OK


def _option(
    panel: str,
    help_text: str,
    *names: str,
    metavar: str | None = None,
    default: str | None = None,
    complete: Callable[[str], list[str]] | None = None,
) -> Any:
    shown = help_text if default is None else f"{help_text} Default: {default}."
    return typer.Option(*names, help=shown, rich_help_panel=panel, metavar=metavar, show_default=False, autocompletion=complete)


def _complete_config(incomplete: str) -> list[str]:
    from eaglecli.config import shipped_configs

    return [name for name in shipped_configs() if name.startswith(incomplete)]


def _complete_run(incomplete: str) -> list[str]:
    """Directories that hold a run, below the one where runs go by default."""
    return sorted(str(path.parent) for path in Path("runs").glob("*/manifest.json") if str(path.parent).startswith(incomplete))


MODEL, INPUT, OUTPUT, SAMPLING = "Models", "Input", "Output", "Sampling"
SPECULATION, ENGINE, GRAPHS, RUN, DEBUG = "Speculation", "Engine", "CUDA graphs", "Run control", "Debug"


# Options that several commands have.
TargetOption = Annotated[
    str | None,
    _option(MODEL, "Target: folder, GGUF file, hub id or smollm2-135m.", "--target", metavar="MODEL", default="from --config"),
]
DraftOption = Annotated[
    str | None,
    _option(
        MODEL,
        "EAGLE draft: folder or hub id; `none` is plain decoding.",
        "--draft",
        metavar="MODEL",
        default="from --config, else none",
    ),
]
RevisionOption = Annotated[str | None, _option(MODEL, "Revision of the target on the hub.", "--revision")]
LocalFilesOnlyOption = Annotated[bool, _option(MODEL, "Never go to the network.", "--local-files-only")]
LoadFormatOption = Annotated[
    Literal["auto", "safetensors", "dummy"],
    _option(MODEL, "`dummy`: random weights for a config alone.", "--load-format", default="auto"),
]
SpeculativeAlgorithmOption = Annotated[
    Literal["EAGLE", "EAGLE3", "NONE"] | None,
    _option(SPECULATION, "What the draft must be.", "--speculative-algorithm", default="as the checkpoint says"),
]
SpeculativeNumStepsOption = Annotated[int | None, _option(SPECULATION, "Depth of the tree.", "--speculative-num-steps", default="5")]
SpeculativeEagleTopkOption = Annotated[int | None, _option(SPECULATION, "Branches per node.", "--speculative-eagle-topk", default="1")]
SpeculativeNumDraftTokensOption = Annotated[
    int | None, _option(SPECULATION, "Nodes verified, the root counted.", "--speculative-num-draft-tokens", default="steps + 1")
]
NumSpeculativeTokensOption = Annotated[int | None, _option(SPECULATION, "K: a chain of K tokens.", "--num-speculative-tokens", metavar="K")]
SpeculativeAdaptiveOption = Annotated[
    bool,
    _option(SPECULATION, "Choose the triple, or none, by batch size from what is measured while running.", "--speculative-adaptive"),
]
SpeculativeAdaptiveConfigOption = Annotated[
    str | None,
    _option(
        SPECULATION,
        'Triples by batch size, as tune writes them: {"1": "7/1/8", "64": ["3/1/4", "none"]}.',
        "--speculative-adaptive-config",
        metavar="JSON",
    ),
]
SpeculativeTokenMapOption = Annotated[
    str | None, _option(SPECULATION, "Reduced vocabulary of an EAGLE-2 draft.", "--speculative-token-map", metavar="FILE")
]
DraftConfigOverridesOption = Annotated[
    str | None, _option(SPECULATION, "Keys of the draft's config to replace.", "--draft-config-overrides", metavar="JSON")
]
DtypeOption = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    _option(ENGINE, "Number format of weights and cache.", "--dtype", default="auto: float32 on cpu, bfloat16 on cuda"),
]
DeviceOption = Annotated[Literal["auto", "cpu", "cuda"], _option(ENGINE, "Where to run.", "--device", default="auto")]
ContextLengthOption = Annotated[
    int | None, _option(ENGINE, "Most tokens of prompt and answer.", "--context-length", default="the target's")
]
MaxRunningRequestsOption = Annotated[int, _option(ENGINE, "Requests that run at a time.", "--max-running-requests", default="16")]
MaxTotalTokensOption = Annotated[
    int | None, _option(ENGINE, "Size of the KV cache in tokens.", "--max-total-tokens", default="from memory")
]
MemFractionStaticOption = Annotated[
    float, _option(ENGINE, "Share of GPU memory for weights and KV cache.", "--mem-fraction-static", default="0.85")
]
ChunkedPrefillSizeOption = Annotated[
    int | None, _option(ENGINE, "Most prompt tokens in one step.", "--chunked-prefill-size", default="8192 on a GPU, else 512")
]
PageSizeOption = Annotated[int, _option(ENGINE, "Tokens per cache page.", "--page-size", default="16")]
ConfigOption = Annotated[
    str | None,
    _option(
        RUN,
        "YAML file, or the name of a shipped one.",
        "--config",
        metavar="FILE",
        default="smollm2-135m, if no --target is given",
        complete=_complete_config,
    ),
]
JsonOption = Annotated[bool, _option(RUN, "Print the statistics as one JSON object on stdout.", "--json")]
QuietOption = Annotated[bool, _option(RUN, "Say nothing but warnings and errors.", "-q", "--quiet")]
NoColorOption = Annotated[bool, _option(RUN, "No colours (NO_COLOR does the same).", "--no-color")]
DebugOption = Annotated[bool, _option(DEBUG, "Show tracebacks.", "--debug")]
AttentionBackendOption = Annotated[
    Literal["torch", "triton"] | None,
    _option(ENGINE, "What computes attention.", "--attention-backend", default="triton on cuda, torch on cpu"),
]
EnableDeterministicInferenceOption = Annotated[
    bool,
    _option(
        ENGINE,
        "The same text bit for bit, whatever batch, order, graph or draft; slower.",
        "--enable-deterministic-inference",
    ),
]
CudaGraphBsOption = Annotated[
    str | None,
    _option(GRAPHS, "Batch sizes in requests: 1 2 4, or 1,2,4.", "--cuda-graph-bs", metavar="N...", default="1 2 4 8 16 24 32 48 ..."),
]
CudaGraphMaxBsOption = Annotated[
    int | None, _option(GRAPHS, "Largest batch size to capture.", "--cuda-graph-max-bs", metavar="N", default="--max-running-requests")
]
DisableCudaGraphOption = Annotated[bool, _option(GRAPHS, "Run without CUDA graphs.", "--disable-cuda-graph")]
DisableCudaGraphPaddingOption = Annotated[
    bool,
    _option(GRAPHS, "A batch of a size not captured runs without a graph, not padded to the next one.", "--disable-cuda-graph-padding"),
]


@app.command(cls=ManyValuesCommand, context_settings={"token_normalize_func": _any_spelling}, epilog=f"{ALIAS_NOTE}\n\n{EXIT_CODES}")
def generate(
    ctx: typer.Context,
    input: Annotated[
        list[str] | None,
        _option(
            INPUT,
            "File, 'pattern', saved data set, hf://name[:split], or - for stdin (repeat for several).",
            "-i",
            "--input",
            metavar="FILE",
        ),
    ] = None,
    input_format: Annotated[
        Literal[
            "auto",
            "prompt",
            "messages",
            "turns",
            "sharegpt",
            "alpaca",
            "openai-batch",
            "tokens",
            "csv",
            "tsv",
            "parquet",
            "text",
        ],
        _option(INPUT, "What a record holds, or how the file is written.", "--input-format", default="auto: seen by content"),
    ] = "auto",
    prompt_field: Annotated[
        str | None, _option(INPUT, "Field that holds the prompt; a.b looks inside.", "--prompt-field", metavar="PATH")
    ] = None,
    id_field: Annotated[str | None, _option(INPUT, "Field that holds the id.", "--id-field", metavar="PATH")] = None,
    map: Annotated[
        list[str] | None,
        _option(INPUT, "Read a field we know from another one: messages=chat.log (repeat).", "--map", metavar="TARGET=PATH"),
    ] = None,
    prompt_template: Annotated[
        str | None, _option(INPUT, "Build the prompt: 'Translate: {text}'.", "--prompt-template", metavar="TEXT")
    ] = None,
    encoding: Annotated[
        str | None, _option(INPUT, "Text encoding of the files.", "--encoding", default="utf-8, or as a byte-order mark says")
    ] = None,
    delimiter: Annotated[
        str | None, _option(INPUT, "What divides the columns of a table.", "--delimiter", default="seen by content")
    ] = None,
    allow_blank: Annotated[bool, _option(INPUT, "Take prompts of blanks alone.", "--allow-blank")] = False,
    keep_fields: Annotated[bool, _option(INPUT, "Pass each record's fields on, under `input`.", "--keep-fields")] = False,
    too_long: Annotated[
        Literal["error", "truncate-left", "truncate-right", "skip"],
        _option(INPUT, "What becomes of a prompt that does not fit.", "--too-long", default="error"),
    ] = "error",
    samples: Annotated[
        list[str] | None, _option(INPUT, "Take the records with these ids: a,b or @FILE.", "--samples", metavar="IDS")
    ] = None,
    shard: Annotated[str | None, _option(INPUT, "Take part i of n, i from 1.", "--shard", metavar="I/N")] = None,
    shuffle_seed: Annotated[
        int | None, _option(INPUT, "Offset, limit and shard pick at random; results stay in input order.", "--shuffle-seed")
    ] = None,
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
    system_prompt: Annotated[
        str | None, _option(INPUT, "System message of conversations that have none.", "--system-prompt", metavar="TEXT")
    ] = None,
    chat_template: Annotated[
        str | None, _option(INPUT, "Jinja template instead of the tokenizer's.", "--chat-template", metavar="FILE")
    ] = None,
    chat_template_kwargs: Annotated[
        str | None, _option(INPUT, "Variables for the template.", "--chat-template-kwargs", metavar="JSON")
    ] = None,
    output: Annotated[
        str | None,
        _option(OUTPUT, "Run directory.", "-o", "--output", metavar="DIR", default="runs/<target>-<input>", complete=_complete_run),
    ] = None,
    resume: Annotated[
        bool, _option(OUTPUT, "Go on with the run that the directory holds.", "--resume/--no-resume", default="resume")
    ] = True,
    overwrite: Annotated[bool, _option(OUTPUT, "Start anew in a directory that holds an earlier run.", "--overwrite")] = False,
    retry_failed: Annotated[bool, _option(OUTPUT, "Do the failed records of an earlier run again.", "--retry-failed")] = False,
    output_format: Annotated[
        Literal["jsonl", "openai-batch", "parquet"],
        _option(OUTPUT, "A further form of the results, made at the end.", "--output-format", default="jsonl: none"),
    ] = "jsonl",
    ordered: Annotated[
        bool, _option(OUTPUT, "Put the results in input order at the end.", "--ordered/--unordered", default="ordered")
    ] = True,
    target: TargetOption = None,
    draft: DraftOption = None,
    tokenizer_path: Annotated[str | None, _option(MODEL, "Tokenizer, if not the target's.", "--tokenizer-path", metavar="MODEL")] = None,
    revision: RevisionOption = None,
    local_files_only: LocalFilesOnlyOption = False,
    load_format: LoadFormatOption = "auto",
    temperature: Annotated[
        float, _option(SAMPLING, "0 is greedy.", "--temperature", default="0, or the model's generation_config if that samples")
    ] = 0.0,
    top_p: Annotated[float, _option(SAMPLING, "Nucleus: 0 < p <= 1.", "--top-p", default="1")] = 1.0,
    top_k: Annotated[int, _option(SAMPLING, "Candidates kept; -1 keeps all.", "--top-k", default="-1")] = -1,
    min_p: Annotated[float, _option(SAMPLING, "Least share of the best candidate's probability.", "--min-p", default="0")] = 0.0,
    repetition_penalty: Annotated[
        float,
        _option(
            SAMPLING,
            "Above 1: fewer tokens of prompt and answer again.",
            "--repetition-penalty",
            default="1, or the model's generation_config if that samples",
        ),
    ] = 1.0,
    presence_penalty: Annotated[
        float, _option(SAMPLING, "Taken from the logits of tokens that the answer has: -2 to 2.", "--presence-penalty", default="0")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, _option(SAMPLING, "The same, for each time they occur: -2 to 2.", "--frequency-penalty", default="0")
    ] = 0.0,
    logit_bias: Annotated[
        str | None, _option(SAMPLING, "Added to logits: '{\"42\": -100}', -100 to 100.", "--logit-bias", metavar="JSON")
    ] = None,
    random_seed: Annotated[int, _option(SAMPLING, "Seed of the run; each record's own follows from it.", "--random-seed", default="0")] = 0,
    max_new_tokens: Annotated[
        int, _option(SAMPLING, "Longest answer in tokens.", "--max-new-tokens", default="512, or the room left")
    ] = 512,
    num_samples: Annotated[int, _option(SAMPLING, "Answers to each record.", "-n", "--num-samples", metavar="N", default="1")] = 1,
    stop: Annotated[
        list[str] | None, _option(SAMPLING, "Text that ends an answer and is left out of it (repeat).", "--stop", metavar="TEXT")
    ] = None,
    min_new_tokens: Annotated[
        int, _option(SAMPLING, "No end-of-text or stop token before the answer has so many.", "--min-new-tokens", default="0")
    ] = 0,
    logprobs: Annotated[
        int | None,
        _option(
            SAMPLING,
            "Log-probability of each token and of the K most probable ones: 0 to 20.",
            "--logprobs",
            metavar="K",
            default="none",
        ),
    ] = None,
    stop_token_ids: Annotated[
        list[str] | None, _option(SAMPLING, "Token ids that end an answer too (repeat, or 1,2).", "--stop-token-ids", metavar="IDS")
    ] = None,
    ignore_eos: Annotated[bool, _option(SAMPLING, "Go on after an end-of-text token.", "--ignore-eos")] = False,
    speculative_algorithm: SpeculativeAlgorithmOption = None,
    speculative_num_steps: SpeculativeNumStepsOption = None,
    speculative_eagle_topk: SpeculativeEagleTopkOption = None,
    speculative_num_draft_tokens: SpeculativeNumDraftTokensOption = None,
    num_speculative_tokens: NumSpeculativeTokensOption = None,
    speculative_adaptive: SpeculativeAdaptiveOption = False,
    speculative_adaptive_config: SpeculativeAdaptiveConfigOption = None,
    speculative_token_map: SpeculativeTokenMapOption = None,
    draft_config_overrides: DraftConfigOverridesOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    context_length: ContextLengthOption = None,
    max_running_requests: MaxRunningRequestsOption = 16,
    max_total_tokens: MaxTotalTokensOption = None,
    mem_fraction_static: MemFractionStaticOption = 0.85,
    chunked_prefill_size: ChunkedPrefillSizeOption = None,
    page_size: PageSizeOption = 16,
    attention_backend: AttentionBackendOption = None,
    enable_deterministic_inference: EnableDeterministicInferenceOption = False,
    cuda_graph_bs: CudaGraphBsOption = None,
    cuda_graph_max_bs: CudaGraphMaxBsOption = None,
    disable_cuda_graph: DisableCudaGraphOption = False,
    disable_cuda_graph_padding: DisableCudaGraphPaddingOption = False,
    config: ConfigOption = None,
    print_config: Annotated[bool, _option(RUN, "Print every setting with its origin, and exit.", "--print-config")] = False,
    dry_run: Annotated[
        bool,
        _option(RUN, "Check everything, count tokens, estimate memory, and exit: no GPU, no weights, nothing is written.", "--dry-run"),
    ] = False,
    on_error: Annotated[
        Literal["record", "stop"],
        _option(RUN, "A bad record is written to errors.jsonl, or stops the run.", "--on-error", default="record"),
    ] = "record",
    max_errors: Annotated[
        int | None, _option(RUN, "Stop when more records than this have failed.", "--max-errors", metavar="N", default="no limit")
    ] = None,
    max_error_rate: Annotated[
        float | None,
        _option(RUN, "Stop when more than this share of the input has failed.", "--max-error-rate", metavar="R", default="no limit"),
    ] = None,
    progress: Annotated[
        Literal["auto", "bar", "plain", "none"], _option(RUN, "How progress is shown on stderr.", "--progress", default="auto")
    ] = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: Annotated[bool, _option(RUN, "Say more: every failed record, every setting.", "-v", "--verbose")] = False,
    no_color: NoColorOption = False,
    log_file: Annotated[
        str | None,
        _option(RUN, "Also append all messages to this file.", "--log-file", metavar="FILE", default="log.txt in the run directory"),
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Generate the target's text for every prompt of a data set.

    [bold]eaglecli generate -i prompts.jsonl -o runs/first[/bold]

    [bold]eaglecli generate --target meta-llama/Llama-3.1-8B-Instruct --draft yuhuili/EAGLE3-LLaMA3.1-Instruct-8B -i prompts.jsonl[/bold]

    Writes generations.jsonl, errors.jsonl, stats.json, manifest.json and log.txt into the run directory.
    """
    console = _console(quiet, verbose, no_color, debug)
    _exit(console, lambda: _generate(ctx.params, _given_names(ctx), console))


def _generate(params: Mapping[str, Any], given_names: set[str], console: Any) -> ExitCode:
    if params["log_file"] is not None:
        console.log_file = _open_log(params["log_file"])
    from eaglecli.commands.generate import generate as run
    from eaglecli.commands.generate import resolve

    given = {name: params[name] for name in given_names if name not in PRESENTATION}
    settings = resolve(given, params["config"], console, needs_device=not (params["dry_run"] or params["print_config"]))
    if params["print_config"]:
        _print_settings(settings, as_json=params["json"])
        return ExitCode.OK
    if params["dry_run"]:
        return _dry_run(settings, console, params["json"])
    result = run(settings, console, ["eaglecli", *sys.argv[1:]])
    if params["json"]:
        _print_json(result.document)
    return result.exit_code


def _dry_run(settings: "GenerateSettings", console: Any, as_json: bool) -> ExitCode:
    from eaglecli.commands.generate import preview

    result = preview(settings, console)
    if as_json:
        _print_json({**result.document, "settings": result.settings.described()})
    else:
        _print_settings(result.settings, as_json=False)
        for line in result.lines:
            typer.echo(line)
    return result.exit_code


def _print_json(document: Mapping[str, Any]) -> None:
    """One object on standard output. A reader that left changes nothing about how the run ended."""
    try:
        typer.echo(json_module.dumps(document, default=str))
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_standard_output()


def _drop_standard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_log(name: str) -> TextIO:
    try:
        return open(name, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115  (open until the process ends)
    except OSError as error:
        raise UserError(f"--log-file {name} cannot be written: {error.strerror or error}", "name another file") from error


@app.command(cls=ManyValuesCommand, context_settings={"token_normalize_func": _any_spelling}, epilog=f"{ALIAS_NOTE}\n\n{EXIT_CODES}")
def capture(
    ctx: typer.Context,
    target: TargetOption = None,
    draft: DraftOption = None,
    revision: RevisionOption = None,
    local_files_only: LocalFilesOnlyOption = False,
    load_format: LoadFormatOption = "auto",
    speculative_algorithm: SpeculativeAlgorithmOption = None,
    speculative_num_steps: SpeculativeNumStepsOption = None,
    speculative_eagle_topk: SpeculativeEagleTopkOption = None,
    speculative_num_draft_tokens: SpeculativeNumDraftTokensOption = None,
    num_speculative_tokens: NumSpeculativeTokensOption = None,
    speculative_adaptive: SpeculativeAdaptiveOption = False,
    speculative_adaptive_config: SpeculativeAdaptiveConfigOption = None,
    speculative_token_map: SpeculativeTokenMapOption = None,
    draft_config_overrides: DraftConfigOverridesOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    context_length: ContextLengthOption = None,
    max_running_requests: MaxRunningRequestsOption = 16,
    max_total_tokens: MaxTotalTokensOption = None,
    mem_fraction_static: MemFractionStaticOption = 0.85,
    page_size: PageSizeOption = 16,
    attention_backend: AttentionBackendOption = None,
    enable_deterministic_inference: EnableDeterministicInferenceOption = False,
    cuda_graph_bs: CudaGraphBsOption = None,
    cuda_graph_max_bs: CudaGraphMaxBsOption = None,
    from_run: Annotated[
        str | None,
        _option(RUN, "Say which batches of an earlier run would have met a graph.", "--from-run", metavar="DIR", complete=_complete_run),
    ] = None,
    config: ConfigOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    no_color: NoColorOption = False,
    debug: DebugOption = False,
) -> None:
    """Capture the CUDA graphs of a target, a draft and a configuration, and check them against the same stages run eagerly.

    [bold]eaglecli capture --target meta-llama/Llama-3.1-8B-Instruct --draft yuhuili/EAGLE3-LLaMA3.1-Instruct-8B[/bold]

    [bold]eaglecli capture --config smollm2-135m --cuda-graph-bs 1 2 4 8 --json[/bold]

    Tells seconds, memory and padding of every graph. Without a GPU the padded stages are checked and nothing is captured.
    """
    console = _console(quiet, no_color=no_color, debug=debug)
    _exit(console, lambda: _capture(ctx.params, _given_names(ctx), console))


def _capture(params: Mapping[str, Any], given_names: set[str], console: Any) -> ExitCode:
    from eaglecli.commands.capture import capture as run
    from eaglecli.commands.capture import resolve

    given = {name: params[name] for name in given_names if name not in (*PRESENTATION, "from_run")}
    result = run(resolve(given, params["config"]), console, params["from_run"])
    if params["json"]:
        _print_json(result.document)
    return result.exit_code


@app.command(cls=ManyValuesCommand, context_settings={"token_normalize_func": _any_spelling}, epilog=f"{ALIAS_NOTE}\n\n{EXIT_CODES}")
def verify(
    ctx: typer.Context,
    input: Annotated[
        list[str] | None,
        _option(INPUT, "Prompts to try; repeat for more files.", "-i", "--input", metavar="FILE", default="built-in prompts"),
    ] = None,
    limit: Annotated[int | None, _option(INPUT, "Take this many records.", "--limit", default="16")] = None,
    apply_chat_template: Annotated[
        bool,
        _option(
            INPUT,
            "Make a `prompt` one user message.",
            "--apply-chat-template/--no-apply-chat-template",
            default="yes, if there is a template",
        ),
    ] = True,
    target: TargetOption = None,
    draft: Annotated[
        str | None, _option(MODEL, "EAGLE draft: folder or hub id.", "--draft", metavar="MODEL", default="from --config")
    ] = None,
    tokenizer_path: Annotated[str | None, _option(MODEL, "Tokenizer, if not the target's.", "--tokenizer-path", metavar="MODEL")] = None,
    revision: RevisionOption = None,
    local_files_only: LocalFilesOnlyOption = False,
    temperature: Annotated[
        float, _option(SAMPLING, "Of the sampled half of the run; 0 leaves it out.", "--temperature", default="1")
    ] = 1.0,
    random_seed: Annotated[int, _option(SAMPLING, "Seed of the sampled half.", "--random-seed", default="0")] = 0,
    max_new_tokens: Annotated[int, _option(SAMPLING, "Longest answer in tokens.", "--max-new-tokens", default="64, or the room left")] = 64,
    ignore_eos: Annotated[bool, _option(SAMPLING, "Go on after an end-of-text token.", "--ignore-eos")] = False,
    speculative_algorithm: SpeculativeAlgorithmOption = None,
    speculative_num_steps: SpeculativeNumStepsOption = None,
    speculative_eagle_topk: SpeculativeEagleTopkOption = None,
    speculative_num_draft_tokens: SpeculativeNumDraftTokensOption = None,
    num_speculative_tokens: NumSpeculativeTokensOption = None,
    speculative_token_map: SpeculativeTokenMapOption = None,
    draft_config_overrides: DraftConfigOverridesOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    context_length: ContextLengthOption = None,
    max_running_requests: MaxRunningRequestsOption = 16,
    mem_fraction_static: MemFractionStaticOption = 0.85,
    chunked_prefill_size: ChunkedPrefillSizeOption = None,
    page_size: PageSizeOption = 16,
    attention_backend: AttentionBackendOption = None,
    enable_deterministic_inference: EnableDeterministicInferenceOption = False,
    cuda_graph_bs: CudaGraphBsOption = None,
    cuda_graph_max_bs: CudaGraphMaxBsOption = None,
    disable_cuda_graph: DisableCudaGraphOption = False,
    disable_cuda_graph_padding: DisableCudaGraphPaddingOption = False,
    config: ConfigOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    no_color: NoColorOption = False,
    debug: DebugOption = False,
) -> None:
    """Show on your own prompts that the text with a draft is the target's own, and that the draft accepts what it should.

    [bold]eaglecli verify --target meta-llama/Llama-3.1-8B-Instruct --draft yuhuili/EAGLE3-LLaMA3.1-Instruct-8B[/bold]

    [bold]eaglecli verify --config my.yaml -i prompts.jsonl --limit 64 --json[/bold]

    A difference is a tie, numeric (nearer than numbers move with the batch) or a bug: then the exit code is 7.
    """
    console = _console(quiet, no_color=no_color, debug=debug)
    _exit(console, lambda: _verify(ctx.params, _given_names(ctx), console))


def _verify(params: Mapping[str, Any], given_names: set[str], console: Any) -> ExitCode:
    from eaglecli.commands.verify import resolve
    from eaglecli.commands.verify import verify as run

    given = {name: params[name] for name in given_names if name not in PRESENTATION}
    result = run(resolve(given, params["config"]), console)
    if params["json"]:
        _print_json(result.document)
    return result.exit_code


def _target_spelling(name: str) -> str:
    """As `_any_spelling`, but for the names of models alone: --max-tokens is a budget of the trainer."""
    dashed = name.replace("_", "-")
    return "target" if dashed in ("model", "model-path") else dashed


DATA, MEASURING, CHECKS = "Data", "Measuring", "Checks"
BENCH_ALIASES = {
    **ALIASES,
    "input": "dataset-path",
    "input-file": "dataset-path",
    "input-len": "random-input-len",
    "output-len": "random-output-len",
    "num-iters": "repeat",
    "limit": "num-prompts",
}


def _bench_spelling(name: str) -> str:
    """As `_any_spelling`, with the names that vLLM's and SGLang's benches have for the same thing."""
    dashed = name.replace("_", "-")
    return BENCH_ALIASES.get(dashed, dashed)


@app.command(cls=ManyValuesCommand, context_settings={"token_normalize_func": _bench_spelling}, epilog=EXIT_CODES)
def bench(
    ctx: typer.Context,
    dataset_name: Annotated[
        Literal["random", "sharegpt", "custom", "eval", "mt-bench", "gsm8k", "humaneval", "alpaca", "sum", "qa"] | None,
        _option(DATA, "What the prompts are; `eval`: all six sets.", "--dataset-name", default="custom with a path, else random"),
    ] = None,
    dataset_path: Annotated[
        list[str] | None,
        _option(DATA, "File of prompts as for generate (repeat), or folder of the evaluation sets.", "--dataset-path", metavar="FILE"),
    ] = None,
    num_prompts: Annotated[
        int | None, _option(DATA, "Prompts of every configuration.", "--num-prompts", metavar="N", default="all; random: the largest batch")
    ] = None,
    input_format: Annotated[str, _option(DATA, "As for generate.", "--input-format", default="auto")] = "auto",
    prompt_field: Annotated[str | None, _option(DATA, "Field that holds the prompt.", "--prompt-field", metavar="PATH")] = None,
    shuffle_seed: Annotated[int | None, _option(DATA, "Shuffle the prompts.", "--shuffle-seed")] = None,
    apply_chat_template: Annotated[
        bool,
        _option(
            DATA,
            "Make a `prompt` one user message.",
            "--apply-chat-template/--no-apply-chat-template",
            default="yes, if there is a template; sharegpt: no",
        ),
    ] = True,
    random_input_len: Annotated[int, _option(DATA, "Prompt tokens of random prompts.", "--random-input-len", default="1024")] = 1024,
    random_output_len: Annotated[int, _option(DATA, "New tokens of random prompts.", "--random-output-len", default="1024")] = 1024,
    random_range_ratio: Annotated[
        float | None,
        _option(
            DATA,
            "Spread of random lengths, (1 - r) to (1 + r) times; with --compat sglang r to 1 times.",
            "--random-range-ratio",
            metavar="R",
            default="0",
        ),
    ] = None,
    sharegpt_output_len: Annotated[
        int | None, _option(DATA, "New tokens for every prompt.", "--sharegpt-output-len", default="as long as the answer in the file")
    ] = None,
    sharegpt_context_len: Annotated[
        int | None, _option(DATA, "Leave out longer pairs.", "--sharegpt-context-len", default="the peers' limits")
    ] = None,
    compat: Annotated[
        Literal["sglang", "vllm"] | None, _option(DATA, "Defaults and rules of that tool's bench.", "--compat", default="none")
    ] = None,
    target: TargetOption = None,
    draft: Annotated[
        str | None,
        _option(
            MODEL, "EAGLE draft; `none`, or `dummy` for random weights.", "--draft", metavar="MODEL", default="from --config, else none"
        ),
    ] = None,
    tokenizer_path: Annotated[str | None, _option(MODEL, "Tokenizer, if not the target's.", "--tokenizer-path", metavar="MODEL")] = None,
    revision: RevisionOption = None,
    local_files_only: LocalFilesOnlyOption = False,
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"],
        _option(
            MODEL, "`dummy`: random weights for a config, or for a shape: llama-3.1-8b, smollm2-135m.", "--load-format", default="auto"
        ),
    ] = "auto",
    batch_size: Annotated[
        str | None, _option(MEASURING, "Requests that run at a time: 1 4 16, or 1,4,16.", "--batch-size", metavar="N...", default="1")
    ] = None,
    config_list: Annotated[
        str | None,
        _option(
            MEASURING,
            "batch,steps,topk,draft_tokens, one after the other; steps 0: plain decoding.",
            "--config-list",
            metavar="B,S,K,N...",
            default="--batch-size with the triple",
        ),
    ] = None,
    baseline: Annotated[bool, _option(MEASURING, "Plain decoding of the same prompts too, and the speed-up.", "--baseline")] = False,
    repeat: Annotated[int, _option(MEASURING, "Timed passes over all prompts.", "--repeat", metavar="N", default="3")] = 3,
    num_warmups: Annotated[
        int | None, _option(MEASURING, "Warm-up windows.", "--num-warmups", metavar="N", default="until two agree within 3 %")
    ] = None,
    skip_warmup: Annotated[bool, _option(MEASURING, "Do not warm up.", "--skip-warmup")] = False,
    disable_ignore_eos: Annotated[
        bool, _option(MEASURING, "Let answers end where they end.", "--disable-ignore-eos", default="end of text is ignored")
    ] = False,
    simulate_acc_len: Annotated[
        float | None,
        _option(
            MEASURING, "Accept so many tokens a step, whatever the draft says; the text means nothing.", "--simulate-acc-len", metavar="X"
        ),
    ] = None,
    profile: Annotated[str | None, _option(MEASURING, "Write a chrome trace of each configuration.", "--profile", metavar="DIR")] = None,
    profile_steps: Annotated[int, _option(MEASURING, "Iterations of a trace.", "--profile-steps", metavar="N", default="20")] = 20,
    compare: Annotated[
        list[str] | None,
        _option(
            CHECKS, "Hold this run against an earlier one; given twice: the second against the first, no run.", "--compare", metavar="FILE"
        ),
    ] = None,
    assert_throughput: Annotated[
        float | None, _option(CHECKS, "Exit code 7 below so many output token/s.", "--assert-throughput", metavar="X")
    ] = None,
    assert_accept_length: Annotated[
        float | None, _option(CHECKS, "Exit code 7 below this accept length.", "--assert-accept-length", metavar="X")
    ] = None,
    assert_speedup: Annotated[
        float | None, _option(CHECKS, "Exit code 7 below this ratio to --baseline.", "--assert-speedup", metavar="X")
    ] = None,
    assert_adaptive_ratio: Annotated[
        float | None,
        _option(
            CHECKS,
            "Exit code 7 where what chooses triples is below this ratio to the best of the others.",
            "--assert-adaptive-ratio",
            metavar="X",
        ),
    ] = None,
    output: Annotated[
        str | None,
        _option(OUTPUT, "Directory of the results.", "-o", "--output", metavar="DIR", default="runs/bench-<target>-<data>-<time>"),
    ] = None,
    overwrite: Annotated[bool, _option(OUTPUT, "Replace the results in that directory.", "--overwrite")] = False,
    output_json: Annotated[str | None, _option(OUTPUT, "Also write bench.json to this file.", "--output-json", metavar="FILE")] = None,
    metric_names: Annotated[
        Literal["sglang", "vllm"], _option(OUTPUT, "Whose names figures bear; vllm: both.", "--metric-names", default="sglang")
    ] = "sglang",
    plot: Annotated[bool, _option(OUTPUT, "Draw report.png (extra `plot`).", "--plot/--no-plot", default="plot")] = True,
    temperature: Annotated[float, _option(SAMPLING, "0 is greedy.", "--temperature", default="0")] = 0.0,
    top_p: Annotated[float, _option(SAMPLING, "Nucleus: 0 < p <= 1.", "--top-p", default="1")] = 1.0,
    top_k: Annotated[int, _option(SAMPLING, "Candidates kept; -1 keeps all.", "--top-k", default="-1")] = -1,
    min_p: Annotated[float, _option(SAMPLING, "Least share of the best candidate's probability.", "--min-p", default="0")] = 0.0,
    random_seed: Annotated[int, _option(SAMPLING, "Seed of prompts and samples.", "--random-seed", default="0")] = 0,
    max_new_tokens: Annotated[
        int, _option(SAMPLING, "Longest answer in tokens.", "--max-new-tokens", default="512, or the room left")
    ] = 512,
    speculative_algorithm: SpeculativeAlgorithmOption = None,
    speculative_num_steps: SpeculativeNumStepsOption = None,
    speculative_eagle_topk: SpeculativeEagleTopkOption = None,
    speculative_num_draft_tokens: SpeculativeNumDraftTokensOption = None,
    num_speculative_tokens: NumSpeculativeTokensOption = None,
    speculative_adaptive: Annotated[
        bool,
        _option(
            SPECULATION,
            "Also measure an engine that chooses among triples and none while running, beside the others.",
            "--speculative-adaptive",
        ),
    ] = False,
    speculative_adaptive_config: SpeculativeAdaptiveConfigOption = None,
    speculative_token_map: SpeculativeTokenMapOption = None,
    draft_config_overrides: DraftConfigOverridesOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    context_length: ContextLengthOption = None,
    max_total_tokens: Annotated[
        int | None, _option(ENGINE, "Size of the KV cache in tokens.", "--max-total-tokens", default="a full batch of the longest prompt")
    ] = None,
    mem_fraction_static: MemFractionStaticOption = 0.85,
    chunked_prefill_size: ChunkedPrefillSizeOption = None,
    page_size: PageSizeOption = 16,
    attention_backend: AttentionBackendOption = None,
    enable_deterministic_inference: EnableDeterministicInferenceOption = False,
    cuda_graph_bs: CudaGraphBsOption = None,
    cuda_graph_max_bs: Annotated[
        int | None,
        _option(GRAPHS, "Largest batch size to capture.", "--cuda-graph-max-bs", metavar="N", default="largest --batch-size"),
    ] = None,
    disable_cuda_graph: DisableCudaGraphOption = False,
    disable_cuda_graph_padding: DisableCudaGraphPaddingOption = False,
    config: ConfigOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    no_color: NoColorOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure throughput and accept length over batch sizes and triples, in one process, on one set of prompts.

    [bold]eaglecli bench --target smollm2-135m --draft runs/draft/draft --dataset-path prompts.jsonl --batch-size 1 4 16 --baseline[/bold]

    [bold]eaglecli bench --load-format dummy --target llama-3.1-8b --draft dummy --simulate-acc-len 2.88 --batch-size 1 8[/bold]

    Writes results.jsonl (a line a configuration), bench.json, report.png, generations.jsonl and log.txt.
    """
    console = _console(quiet, no_color=no_color, debug=debug)
    _exit(console, lambda: _bench(ctx.params, _given_names(ctx), console))


def _bench(params: Mapping[str, Any], given_names: set[str], console: Any) -> ExitCode:
    from eaglecli.commands.bench import bench as run
    from eaglecli.commands.bench import resolve

    given = {name: params[name] for name in given_names if name not in PRESENTATION}
    result = run(resolve(given, params["config"]), console, ["eaglecli", *sys.argv[1:]])
    if params["json"]:
        _print_json(result.document)
    return result.exit_code


ANSWERS, TRAINING = "Answers", "Training"


@app.command(cls=ReadableHelpCommand, context_settings={"token_normalize_func": _target_spelling}, epilog=EXIT_CODES)
def train(
    ctx: typer.Context,
    target: Annotated[
        str | None, _option(MODEL, "Target: folder, GGUF file, hub id or smollm2-135m.", "--target", metavar="MODEL", default="required")
    ] = None,
    prompts: Annotated[
        list[str] | None, _option(INPUT, "Prompts to answer, as for generate; repeat for more files.", "--prompts", metavar="FILE")
    ] = None,
    self_prompts: Annotated[int, _option(INPUT, "Prompts that the target writes itself.", "--self-prompts", metavar="N", default="0")] = 0,
    output: Annotated[
        str | None,
        _option(OUTPUT, "Directory of the training, taken up again if it exists.", "-o", "--output", metavar="DIR", default="required"),
    ] = None,
    overwrite: Annotated[bool, _option(OUTPUT, "Give up everything of an earlier call.", "--overwrite")] = False,
    retrain: Annotated[bool, _option(OUTPUT, "Keep the answers of an earlier call and train anew.", "--retrain")] = False,
    max_shard_bytes: Annotated[
        int | None, _option(OUTPUT, "Largest file of the checkpoint.", "--max-shard-bytes", metavar="BYTES", default="no limit")
    ] = None,
    tokenizer_path: Annotated[str | None, _option(MODEL, "Tokenizer, if not the target's.", "--tokenizer-path", metavar="MODEL")] = None,
    revision: RevisionOption = None,
    local_files_only: LocalFilesOnlyOption = False,
    num_samples: Annotated[int, _option(ANSWERS, "Answers per prompt: one greedy, the others sampled.", "--num-samples", default="2")] = 2,
    low_temperature: Annotated[float, _option(ANSWERS, "Lowest temperature of sampled answers.", "--low-temperature", default="0.7")] = 0.7,
    high_temperature: Annotated[float, _option(ANSWERS, "Highest one.", "--high-temperature", default="1.0")] = 1.0,
    max_new_tokens: Annotated[int, _option(ANSWERS, "Longest answer in tokens.", "--max-new-tokens", default="512")] = 512,
    max_answer_tokens: Annotated[
        int | None, _option(ANSWERS, "Stop answering after so many tokens in all.", "--max-answer-tokens", default="no limit")
    ] = None,
    max_running_requests: Annotated[int, _option(ANSWERS, "Requests that run at a time.", "--max-running-requests", default="256")] = 256,
    draft_vocab_size: Annotated[
        int, _option(SPECULATION, "Tokens that the draft can propose.", "--draft-vocab-size", default="32000")
    ] = 32000,
    tap_boundaries: Annotated[
        str | None,
        _option(
            SPECULATION, "Target states the draft sees: after so many layers.", "--tap-boundaries", metavar="L,M,H", default="2, N//2, N-3"
        ),
    ] = None,
    intermediate_size: Annotated[
        int | None, _option(SPECULATION, "Width of the draft's MLP.", "--intermediate-size", metavar="N", default="the target's")
    ] = None,
    rope_theta: Annotated[float, _option(SPECULATION, "Rotary base of the draft.", "--rope-theta", default="10000")] = 10000.0,
    sequence_length: Annotated[int, _option(TRAINING, "Positions of a packed sequence.", "--sequence-length", default="2048")] = 2048,
    num_unroll_steps: Annotated[int, _option(TRAINING, "Draft steps that are trained.", "--num-unroll-steps", default="7")] = 7,
    step_decay: Annotated[float, _option(TRAINING, "Weight of a step, beside the one before it.", "--step-decay", default="0.8")] = 0.8,
    label_temperature: Annotated[
        float, _option(TRAINING, "Temperature of the target's distribution as label.", "--label-temperature", default="1.0")
    ] = 1.0,
    batch_size: Annotated[int, _option(TRAINING, "Sequences per optimizer step.", "--batch-size", default="32")] = 32,
    micro_batch_size: Annotated[
        int | None, _option(TRAINING, "Sequences that run at a time.", "--micro-batch-size", default="at most 16")
    ] = None,
    learning_rate: Annotated[float, _option(TRAINING, "Peak of the learning rate.", "--learning-rate", default="0.001")] = 1e-3,
    warmup_steps: Annotated[int, _option(TRAINING, "Steps until that peak.", "--warmup-steps", default="30")] = 30,
    clip_norm: Annotated[float, _option(TRAINING, "Largest norm of the gradient.", "--clip-norm", default="0.5")] = 0.5,
    epochs: Annotated[int | None, _option(TRAINING, "Passes over the answers.", "--epochs", default="3, without another budget")] = None,
    num_steps: Annotated[int | None, _option(TRAINING, "Optimizer steps in all.", "--num-steps", default="no limit")] = None,
    max_tokens: Annotated[int | None, _option(TRAINING, "Packed positions trained on in all.", "--max-tokens", default="no limit")] = None,
    seconds: Annotated[float | None, _option(TRAINING, "Seconds of training in all.", "--seconds", default="no limit")] = None,
    held_out: Annotated[
        int, _option(TRAINING, "Prompts kept for measuring, at most a tenth.", "--held-out", metavar="N", default="64")
    ] = 64,
    held_out_new_tokens: Annotated[int, _option(TRAINING, "Longest answer when measuring.", "--held-out-new-tokens", default="128")] = 128,
    evaluate_every: Annotated[int, _option(TRAINING, "Steps between measurements.", "--evaluate-every", default="200")] = 200,
    random_seed: Annotated[int, _option(TRAINING, "Seed of everything that is random.", "--random-seed", default="0")] = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    stop_after_s: Annotated[
        float | None,
        _option(RUN, "End this call after so many seconds; the next one goes on.", "--stop-after", metavar="S", default="no limit"),
    ] = None,
    checkpoint_every_s: Annotated[
        float, _option(RUN, "Seconds between checkpoints.", "--checkpoint-every", metavar="S", default="60")
    ] = 60.0,
    progress: Annotated[
        Literal["auto", "bar", "plain", "none"], _option(RUN, "How progress is shown on stderr.", "--progress", default="auto")
    ] = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
    no_color: NoColorOption = False,
    debug: DebugOption = False,
) -> None:
    """Train an EAGLE-3 draft for a target on the target's own answers.

    [bold]eaglecli train --target smollm2-135m --prompts prompts.jsonl --output runs/draft[/bold]

    [bold]eaglecli train --target smollm2-135m --prompts prompts.jsonl --self-prompts 20000 -o runs/draft --epochs 3 --stop-after 500[/bold]

    Writes the draft into the folder draft/ of the output directory, in the layout that SGLang and vLLM read too.
    """
    console = _console(quiet, no_color=no_color, debug=debug)
    _exit(console, lambda: _train(ctx.params, _given_names(ctx), console))


def _train(params: Mapping[str, Any], given_names: set[str], console: Any) -> ExitCode:
    from eaglecli.commands.train import resolve
    from eaglecli.commands.train import train as run

    result = run(resolve({name: params[name] for name in given_names if name not in PRESENTATION}), console)
    if params["json"]:
        _print_json(result.document)
    return result.exit_code


@app.command(cls=ManyValuesCommand, context_settings={"token_normalize_func": _any_spelling}, epilog=f"{ALIAS_NOTE}\n\n{EXIT_CODES}")
def tune(
    ctx: typer.Context,
    input: Annotated[
        list[str] | None,
        _option(INPUT, "Prompts like those that will be generated for, as for generate.", "-i", "--input", metavar="FILE"),
    ] = None,
    input_format: Annotated[str, _option(INPUT, "As for generate.", "--input-format", default="auto")] = "auto",
    prompt_field: Annotated[str | None, _option(INPUT, "Field that holds the prompt.", "--prompt-field", metavar="PATH")] = None,
    shuffle_seed: Annotated[int | None, _option(INPUT, "Take the sample at random.", "--shuffle-seed")] = None,
    limit: Annotated[int | None, _option(INPUT, "Records in the sample.", "--limit", default="256")] = None,
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
        str, _option(OUTPUT, "Config file to write, for generate --config.", "-o", "--output", metavar="FILE.yaml", default="tuned.yaml")
    ] = "tuned.yaml",
    overwrite: Annotated[bool, _option(OUTPUT, "Replace that file.", "--overwrite")] = False,
    target: TargetOption = None,
    draft: DraftOption = None,
    tokenizer_path: Annotated[str | None, _option(MODEL, "Tokenizer, if not the target's.", "--tokenizer-path", metavar="MODEL")] = None,
    revision: RevisionOption = None,
    local_files_only: LocalFilesOnlyOption = False,
    temperature: Annotated[float, _option(SAMPLING, "0 is greedy.", "--temperature", default="0, or as the model says")] = 0.0,
    max_new_tokens: Annotated[int, _option(SAMPLING, "Longest answer in tokens.", "--max-new-tokens", default="256")] = 256,
    speculative_algorithm: SpeculativeAlgorithmOption = None,
    speculative_token_map: SpeculativeTokenMapOption = None,
    draft_config_overrides: DraftConfigOverridesOption = None,
    batch_size: Annotated[
        str | None,
        _option(SPECULATION, "Requests that run at a time: 1 4 16, or 1,4,16.", "--batch-size", metavar="N...", default="1 4 16 64"),
    ] = None,
    config_list: Annotated[
        str | None,
        _option(
            SPECULATION,
            "Candidates: steps,topk,draft_tokens, or batch,steps,topk,draft_tokens; plain decoding always is one.",
            "--config-list",
            metavar="S,K,N...",
            default="chains of 2 3 5 7 and the tree 5,4,16",
        ),
    ] = None,
    seconds: Annotated[float, _option(RUN, "Most seconds for a batch size.", "--seconds", default="20")] = 20.0,
    num_iters: Annotated[
        int | None, _option(RUN, "Iterations of a candidate in the first round.", "--num-iters", metavar="N", default="16 to 96")
    ] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    context_length: ContextLengthOption = None,
    max_total_tokens: MaxTotalTokensOption = None,
    mem_fraction_static: MemFractionStaticOption = 0.85,
    page_size: PageSizeOption = 16,
    attention_backend: AttentionBackendOption = None,
    disable_cuda_graph: DisableCudaGraphOption = False,
    config: ConfigOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    no_color: NoColorOption = False,
    debug: DebugOption = False,
) -> None:
    """Find the fastest triple, or none, for each batch size on a sample of your prompts, and write a config that says so.

    [bold]eaglecli tune --config smollm2-135m -i prompts.jsonl -o tuned.yaml[/bold]

    [bold]eaglecli tune --target M --draft D -i prompts.jsonl --batch-size 1 8 64 --config-list 3,1,4 5,1,6 5,4,16[/bold]

    Then: eaglecli generate --config tuned.yaml -i prompts.jsonl, with --speculative-adaptive to choose from the table while running.
    """
    console = _console(quiet, no_color=no_color, debug=debug)
    _exit(console, lambda: _tune(ctx.params, _given_names(ctx), console))


def _tune(params: Mapping[str, Any], given_names: set[str], console: Any) -> ExitCode:
    from eaglecli.commands.tune import TuneOptions, resolve
    from eaglecli.commands.tune import tune as run

    own = ("output", "batch_size", "config_list", "seconds", "num_iters", "overwrite")
    options = TuneOptions(*(params[name] for name in own))
    given = {name: params[name] for name in given_names if name not in (*PRESENTATION, *own)}
    result = run(resolve(given, params["config"]), options, console)
    if params["json"]:
        _print_json(result.document)
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


def _console(quiet: bool = False, verbose: bool = False, no_color: bool = False, debug: bool = False) -> Any:
    from eaglecli.io.console import Console
    from eaglecli.io.terminal import describe_terminal

    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    terminal = describe_terminal(is_terminal, os.environ, no_color)
    return Console(quiet=quiet, color=terminal.colors, moves=terminal.moves, debug=debug, verbose=verbose)


def _exit(console: Any, command: Callable[[], ExitCode]) -> None:
    """Runs a command body and leaves the process with its code: one sentence on stderr, a traceback only with --debug."""
    code = ExitCode.INTERNAL
    try:
        with ending_at_once(console.error):  # from the first import on; a command that has something to keep catches the signal itself
            code = command()
    except UserError as error:
        console.trace(error)
        console.error(error.message, error.hint)
        code = error.exit_code
    except BrokenPipeError:
        _drop_standard_output()  # the reader left: nothing more can be said there
        code = ExitCode.OK
    except Interrupted as interrupted:
        console.error(f"{interrupted}: stopped before there was anything to keep")
        code = interrupted.exit_code
    except Exception as error:
        console.trace(error)
        console.error(f"internal error: {type(error).__name__}: {error}", "run again with --debug and report the traceback")
    raise typer.Exit(int(code))


def main() -> None:
    """Console script."""
    try:
        app(prog_name="eaglecli")
    except SystemExit as leaving:
        leave_process(int(leaving.code or ExitCode.OK))
