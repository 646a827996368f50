"""Settings of a run: names, defaults, checks, and the layers that are laid over one another, with the origin of every value.

Order: (record >) command line > config file > generation_config > default. A value counts as given when its layer names
it, whatever the value: 0, false and "" survive.
"""

import codecs
import dataclasses
import difflib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eaglecli.errors import UserError
from eaglecli.speculation_table import NO_TRIPLE, Triple, normalize_table, parse_triple

DEFAULT_CONFIG = "smollm2-135m"
DEVICE_SECTIONS = ("cpu", "cuda")
COMMAND_LINE, GENERATION_CONFIG, DEFAULT, DERIVED = "command line", "generation_config", "default", "derived"
CHOOSER_SETTINGS = ("speculative_adaptive", "speculative_adaptive_config")
TRIPLE_SETTINGS = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens", "num_speculative_tokens")
INPUT_FORMATS = (
    *("auto", "prompt", "messages", "turns", "sharegpt", "alpaca", "openai-batch", "tokens"),  # what a record holds
    *("csv", "tsv", "parquet", "text"),  # how the file is written
)
GRAPH_SETTINGS = ("cuda_graph_bs", "cuda_graph_max_bs", "disable_cuda_graph_padding")
ATTENTION_BACKENDS = ("torch", "triton")
MAX_SAMPLES = 1_000_000  # a line's key has 20 bits for the sample
MODELS_OWN_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # taken from a generation_config that samples
MAX_LOGPROBS, MAX_LOGIT_BIAS = 20, 100  # as in OpenAI's API
DEFAULT_PREFILL_CHUNKS = {"cpu": 512, "cuda": 8192}  # prompt tokens of one step; on a GPU a prefill of few costs as much as one of many
DEFAULT_NUM_STEPS, DEFAULT_TOPK, DEFAULT_TREE_TOKENS = 5, 1, 8

Check = Callable[[Any], Any]


def _number(low: float, high: float = math.inf, above_low: bool = False) -> Check:
    def check(value: Any) -> float:
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not good or not low <= value <= high or (above_low and value == low):
            limit = f"a number {'above' if above_low else 'from'} {low:g}" + (f" up to {high:g}" if high < math.inf else " up")
            raise ValueError(f"must be {limit}, not {_shown(value)}")
        return float(value)

    return check


def _integer(low: int, high: int | None = None) -> Check:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            limit = f"of at least {low}" if high is None else f"from {low} to {high}"
            raise ValueError(f"must be an integer {limit}, not {_shown(value)}")
        return value

    return check


def _top_k(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
        raise ValueError(f"must be an integer of at least 1, or -1 for the whole vocabulary, not {_shown(value)}")
    return value


def _choice(*names: str) -> Check:
    def check(value: Any) -> str:
        if value not in names:
            raise ValueError(f"must be one of {', '.join(names)}, not {_shown(value)}")
        return value

    return check


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {_shown(value)}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be a text that is not empty, not {_shown(value)}")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    """One text, or a list of them."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not items or any(not isinstance(item, str) or not item for item in items):
        raise ValueError(f"must be a text or a list of texts that are not empty, not {_shown(value)}")
    return tuple(items)


def _encoding(value: Any) -> str:
    try:
        "".encode(_text(value))
        return codecs.lookup(value).name
    except LookupError:
        raise ValueError(f"must be the name of a text encoding such as utf-8 or cp1252, not {_shown(value)}") from None


def _delimiter(value: Any) -> str:
    value = {"\\t": "\t", "tab": "\t"}.get(value, value)
    if not isinstance(value, str) or len(value) != 1 or value in '"\r\n':
        raise ValueError(f"must be one character, or tab, not {_shown(value)}")
    return value


def normalize_graph_sizes(value: Any) -> tuple[int, ...]:
    """Batch sizes in any order, repeated or not, as a list or as text like "8,1 2": ascending, each once. An empty list is no graphs."""
    parts = value.replace(",", " ").split() if isinstance(value, str) else value
    parts = list(parts) if isinstance(parts, list | tuple) else [parts]
    items = [int(part) if isinstance(part, str) and part.isdecimal() else part for part in parts]
    if any(isinstance(item, bool) or not isinstance(item, int) or item < 1 for item in items):
        raise ValueError(f"must be a list of batch sizes (requests, integers of at least 1), not {_shown(value)}")
    return tuple(sorted(set(items)))


def normalize_stop_token_ids(value: Any) -> tuple[int, ...]:
    """Token ids as a list of integers, or as text like "2,0" from the command line."""
    if isinstance(value, str):
        value = [int(part) if part.strip().isdecimal() else part for part in value.split(",")]
    items = list(value) if isinstance(value, list | tuple) else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in items):
        raise ValueError(f"must be a list of token ids (integers of at least 0), not {_shown(value)}")
    return tuple(dict.fromkeys(items))


def normalize_stop_strings(value: Any) -> tuple[str, ...]:
    """One text or a list of texts, each once; an empty text or list asks for none."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or any(not isinstance(item, str) for item in items):
        raise ValueError(f"must be a text or a list of texts, not {_shown(value)}")
    if list(items) == [""]:
        return ()
    if "" in items:
        raise ValueError("must not hold an empty text beside others")
    if any("\ufffd" in item or not _is_unicode(item) for item in items):
        raise ValueError(f"must be whole characters, without U+FFFD and lone surrogates, not {_shown(value)}")
    return tuple(dict.fromkeys(items))


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def normalize_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """(token id, bias) pairs by id, from an object of them, JSON text of one, or the pairs themselves."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list | tuple) or any(not isinstance(pair, list | tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError('must be an object of token ids and numbers, as {"42": -100}')
    check_bias = _number(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    found: dict[int, float] = {}
    for token, bias in pairs:
        number = int(token) if isinstance(token, str) and token.isascii() and token.isdecimal() else token
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ValueError(f"must name token ids (integers of at least 0), not {_shown(token)}")
        try:
            found[number] = check_bias(bias)
        except ValueError as error:
            raise ValueError(f"of token {number} {error}") from None
    return tuple(sorted(found.items()))


def _overrides(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError(f"must be a JSON object, not {_shown(value)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, not {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    return repr(value)[:80]


SAMPLING_CHECKS: dict[str, Check] = {
    "temperature": _number(0),
    "top_p": _number(0, 1, above_low=True),
    "top_k": _top_k,
    "min_p": _number(0, 1),
    "repetition_penalty": _number(0, above_low=True),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "logit_bias": normalize_logit_bias,
    "max_new_tokens": _integer(1),
    "min_new_tokens": _integer(0),
    "logprobs": _integer(0, MAX_LOGPROBS),
    "num_samples": _integer(1, MAX_SAMPLES),
    "stop": normalize_stop_strings,
    "stop_token_ids": normalize_stop_token_ids,
    "ignore_eos": _flag,
}


def _setting(check: Check, default: Any = None, changes_text: bool = True) -> Any:
    """`changes_text` False: a run that is taken up again may be given another value (models are compared by their files)."""
    return field(default=default, metadata={"check": check, "changes_text": changes_text})


@dataclass(frozen=True)
class GenerateSettings:
    """Everything that `generate` can be told. Field names are the long options in snake_case and the keys of a config file."""

    target: str | None = _setting(_text, changes_text=False)
    draft: str | None = _setting(_text, changes_text=False)
    tokenizer_path: str | None = _setting(_text, changes_text=False)
    revision: str | None = _setting(_text, changes_text=False)
    local_files_only: bool = _setting(_flag, False, changes_text=False)
    load_format: str = _setting(_choice("auto", "safetensors", "dummy"), "auto")

    input: tuple[str, ...] | None = _setting(_texts, changes_text=False)
    input_format: str = _setting(_choice(*INPUT_FORMATS), "auto")
    encoding: str | None = _setting(_encoding)
    delimiter: str | None = _setting(_delimiter)
    prompt_field: str | None = _setting(_text)
    id_field: str | None = _setting(_text)
    map: tuple[str, ...] = _setting(_texts, ())
    prompt_template: str | None = _setting(_text)
    allow_blank: bool = _setting(_flag, False)
    keep_fields: bool = _setting(_flag, False)
    too_long: str = _setting(_choice("error", "truncate-left", "truncate-right", "skip"), "error")
    samples: tuple[str, ...] = _setting(_texts, ())
    shard: str | None = _setting(_text)
    shuffle_seed: int | None = _setting(_integer(0))
    limit: int | None = _setting(_integer(1))
    offset: int = _setting(_integer(0), 0)
    apply_chat_template: bool = _setting(_flag, True)
    system_prompt: str | None = _setting(_text)
    chat_template: str | None = _setting(_text)
    chat_template_kwargs: Mapping[str, Any] | None = _setting(_overrides)

    output: str | None = _setting(_text, changes_text=False)
    overwrite: bool = _setting(_flag, False, changes_text=False)
    resume: bool = _setting(_flag, True, changes_text=False)
    retry_failed: bool = _setting(_flag, False, changes_text=False)
    output_format: str = _setting(_choice("jsonl", "openai-batch", "parquet"), "jsonl", changes_text=False)
    ordered: bool = _setting(_flag, True, changes_text=False)

    temperature: float = _setting(SAMPLING_CHECKS["temperature"], 0.0)
    top_p: float = _setting(SAMPLING_CHECKS["top_p"], 1.0)
    top_k: int = _setting(SAMPLING_CHECKS["top_k"], -1)
    min_p: float = _setting(SAMPLING_CHECKS["min_p"], 0.0)
    repetition_penalty: float = _setting(SAMPLING_CHECKS["repetition_penalty"], 1.0)
    presence_penalty: float = _setting(SAMPLING_CHECKS["presence_penalty"], 0.0)
    frequency_penalty: float = _setting(SAMPLING_CHECKS["frequency_penalty"], 0.0)
    logit_bias: tuple[tuple[int, float], ...] = _setting(SAMPLING_CHECKS["logit_bias"], ())
    random_seed: int = _setting(_integer(0), 0)
    max_new_tokens: int = _setting(SAMPLING_CHECKS["max_new_tokens"], 512)
    min_new_tokens: int = _setting(SAMPLING_CHECKS["min_new_tokens"], 0)
    logprobs: int | None = _setting(SAMPLING_CHECKS["logprobs"])
    num_samples: int = _setting(SAMPLING_CHECKS["num_samples"], 1)
    stop: tuple[str, ...] = _setting(SAMPLING_CHECKS["stop"], ())
    stop_token_ids: tuple[int, ...] = _setting(SAMPLING_CHECKS["stop_token_ids"], ())
    ignore_eos: bool = _setting(SAMPLING_CHECKS["ignore_eos"], False)

    speculative_algorithm: str | None = _setting(_choice("EAGLE", "EAGLE3", "NONE"), changes_text=False)
    speculative_num_steps: int | None = _setting(_integer(1), changes_text=False)
    speculative_eagle_topk: int | None = _setting(_integer(1), changes_text=False)
    speculative_num_draft_tokens: int | None = _setting(_integer(2), changes_text=False)
    num_speculative_tokens: int | None = _setting(_integer(1), changes_text=False)
    speculative_adaptive: bool = _setting(_flag, False, changes_text=False)
    speculative_adaptive_config: Mapping[str, list[str]] | None = _setting(normalize_table, changes_text=False)
    speculative_token_map: str | None = _setting(_text)
    draft_config_overrides: Mapping[str, Any] | None = _setting(_overrides)

    dtype: str = _setting(_choice("auto", "float32", "bfloat16", "float16"), "auto")
    device: str = _setting(_choice("auto", "cpu", "cuda"), "auto")
    context_length: int | None = _setting(_integer(2))
    max_running_requests: int = _setting(_integer(1), 16, changes_text=False)
    max_total_tokens: int | None = _setting(_integer(1), changes_text=False)
    mem_fraction_static: float = _setting(_number(0, 1, above_low=True), 0.85, changes_text=False)
    chunked_prefill_size: int | None = _setting(_integer(1), changes_text=False)
    page_size: int = _setting(_integer(1), 16, changes_text=False)
    attention_backend: str | None = _setting(_choice(*ATTENTION_BACKENDS), changes_text=False)
    enable_deterministic_inference: bool = _setting(_flag, False)
    cuda_graph_bs: tuple[int, ...] | None = _setting(normalize_graph_sizes, changes_text=False)
    cuda_graph_max_bs: int | None = _setting(_integer(1), changes_text=False)
    disable_cuda_graph: bool = _setting(_flag, False, changes_text=False)
    disable_cuda_graph_padding: bool = _setting(_flag, False, changes_text=False)

    on_error: str = _setting(_choice("record", "stop"), "record", changes_text=False)
    max_errors: int | None = _setting(_integer(0), changes_text=False)
    max_error_rate: float | None = _setting(_number(0, 1), changes_text=False)
    progress: str = _setting(_choice("auto", "bar", "plain", "none"), "auto", changes_text=False)

    origins: Mapping[str, str] = field(default_factory=dict)  # where each value comes from; a name that is absent has its default

    def origin(self, name: str) -> str:
        """Where the value of `name` comes from."""
        return self.origins.get(name, DEFAULT)

    def with_generation_config(self, generation_config: Mapping[str, Any]) -> "GenerateSettings":
        """The model's own sampling values under those that the user gave; they count only if it says `do_sample: true`."""
        if generation_config.get("do_sample") is not True:
            return self
        layer = {name: generation_config[name] for name in MODELS_OWN_SAMPLING if generation_config.get(name) is not None}
        if layer.get("top_k") == 0:
            layer["top_k"] = -1  # transformers' spelling of "the whole vocabulary"
        given = {name: value for name, value in layer.items() if self.origin(name) == DEFAULT}
        checked = {name: _checked(name, value, GENERATION_CONFIG) for name, value in given.items()}
        return dataclasses.replace(self, **checked, origins={**self.origins, **dict.fromkeys(checked, GENERATION_CONFIG)})

    def with_derived(self, **values: Any) -> "GenerateSettings":
        """Values that the program found out itself (device, dtype, triple ...), stamped so unless somebody gave the same one."""
        changed = {name: value for name, value in values.items() if getattr(self, name) != value}
        return dataclasses.replace(self, **values, origins={**self.origins, **dict.fromkeys(changed, DERIVED)})

    def described(self) -> dict[str, dict[str, Any]]:
        """Every setting with its value and origin, for the manifest and --print-config."""
        return {name: {"value": _plain(getattr(self, name)), "origin": self.origin(name)} for name in SETTINGS}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


SETTINGS: dict[str, "dataclasses.Field[Any]"] = {
    item.name: item for item in dataclasses.fields(GenerateSettings) if "check" in item.metadata
}
PATH_SETTINGS = ("output", "speculative_token_map", "chat_template")
MODEL_SETTINGS = ("target", "draft", "tokenizer_path")


@dataclass(frozen=True)
class ConfigFile:
    """A config file as read: `common` for every device, `sections` laid over it for one. Keys are known, values are not checked yet."""

    path: Path
    common: Mapping[str, Any]
    sections: Mapping[str, Mapping[str, Any]]


def find_config(name: str) -> Path:
    """The file that `--config` means: a path, or the name of one that comes with the package."""
    path = Path(name)
    if path.is_file():
        return path
    shipped = shipped_configs()
    if name in shipped:
        return shipped[name]
    nearest = difflib.get_close_matches(name, shipped, 1)
    hint = f"did you mean `{nearest[0]}`?" if nearest else f"give a YAML file or one of: {', '.join(sorted(shipped))}"
    raise UserError(f"there is no config file `{name}`", hint)


def shipped_configs() -> dict[str, Path]:
    """Configs by name: packed beside the code in a wheel, at the top of the tree in a checkout."""
    return _shipped("*.yaml")


def shipped_shapes() -> dict[str, Path]:
    """Shapes of models (config.json files without weights) by name, for speed runs with `--load-format dummy`."""
    return _shipped("shapes/*.json")


def _shipped(pattern: str) -> dict[str, Path]:
    here = Path(__file__).parent
    folder = next((folder for folder in (here / "_configs", here.parent / "configs") if folder.is_dir()), None)
    return {path.stem: path for path in sorted(folder.glob(pattern))} if folder else {}


def read_config(path: Path) -> ConfigFile:
    """Reads a YAML config. Raises UserError for what is no YAML, keys unknown (with the nearest name) or given twice, and wrong values."""
    import yaml  # here, so that --help does not pay for it

    class UniqueKeys(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
            node = super().compose_mapping_node(anchor)
            seen: set[tuple[str, str]] = set()
            for key, _ in node.value:
                name = (key.tag, str(key.value))
                if name in seen:
                    raise UserError(
                        f"config file {path}, line {key.start_mark.line + 1}: `{key.value}` is given twice", "keep one of the two"
                    )
                seen.add(name)
            return node

    try:
        document = yaml.load(path.read_text(encoding="utf-8"), UniqueKeys)
    except OSError as error:
        raise UserError(f"config file {path} cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"config file {path} is not YAML: {' '.join(str(error).split())}") from error
    document = {} if document is None else document
    if not isinstance(document, dict):
        raise UserError(f"config file {path} must be a mapping of option names to values")
    sections = {device: document.pop(device) or {} for device in DEVICE_SECTIONS if device in document}
    for where, layer in {"": document, **sections}.items():
        _check_layer(path, where, layer)
    return ConfigFile(path, _anchored(document, path), {device: _anchored(layer, path) for device, layer in sections.items()})


def _check_layer(path: Path, section: str, layer: Any) -> None:
    place = f"config file {path}" + (f", section {section}" if section else "")
    if not isinstance(layer, dict):
        raise UserError(f"{place}: must be a mapping of option names to values")
    for name, value in layer.items():
        if name not in SETTINGS:
            nearest = difflib.get_close_matches(str(name), [*SETTINGS, *([] if section else DEVICE_SECTIONS)], 1)
            hint = f"did you mean `{nearest[0]}`?" if nearest else "keys are the long option names in snake_case"
            raise UserError(f"{place}: unknown key `{name}`", hint)
        if value is not None:
            _checked(name, value, place)


def _anchored(layer: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Relative paths count from the config file's folder; a model's name stays one unless it is found there."""
    anchored = dict(layer)
    for name in (*PATH_SETTINGS, *MODEL_SETTINGS):
        value = anchored.get(name)
        if value is None or Path(value).is_absolute():
            continue
        candidate = path.parent / value
        if name in PATH_SETTINGS or value.startswith(("./", "../")) or candidate.exists():
            anchored[name] = str(candidate)
    if anchored.get("input") is not None:
        anchored["input"] = [_anchored_input(value, path.parent) for value in _texts(anchored["input"])]
    return anchored


def _anchored_input(value: str, folder: Path) -> str:
    """Standard input and hub names are no paths."""
    return value if value == "-" or value.startswith("hf://") or Path(value).is_absolute() else str(folder / value)


def resolve_settings(given: Mapping[str, Any], config: ConfigFile | None, find_device: Callable[[str], str]) -> GenerateSettings:
    """Lays the command line's `given` values over the config file's over the defaults.

    A triple on the command line sets aside what a config file says of choosing among several.
    `find_device` turns the requested device ("auto" included) into "cpu" or "cuda"; it is asked once. Raises UserError.
    """
    values = {name: _checked(name, value, COMMAND_LINE) for name, value in given.items()}
    origins = dict.fromkeys(values, COMMAND_LINE)
    common = config.common if config else {}
    device = find_device(values.get("device") or common.get("device") or "auto")
    layers = [(common, "config file")]
    if config:
        layers.insert(0, (config.sections.get(device, {}), f"config file, {device}"))
    set_aside = CHOOSER_SETTINGS if set(TRIPLE_SETTINGS) & set(given) else ()
    for layer, origin in layers:
        for name, value in layer.items():
            if value is not None and name not in values and name not in set_aside:
                values[name] = _checked(name, value, f"config file {config.path}" if config else origin)
                origins[name] = origin
    _check_lengths(values)
    chunk = values.get("chunked_prefill_size") or DEFAULT_PREFILL_CHUNKS[device]
    return GenerateSettings(**values, origins=origins).with_derived(device=device, chunked_prefill_size=chunk)


def _check_lengths(values: Mapping[str, Any]) -> None:
    least, most = (values.get(name, SETTINGS[name].default) for name in ("min_new_tokens", "max_new_tokens"))
    if least > most:
        raise UserError(f"--min-new-tokens {least} is more than --max-new-tokens {most}", "lower the one or raise the other")


def _checked(name: str, value: Any, place: str) -> Any:
    try:
        return SETTINGS[name].metadata["check"](value)
    except ValueError as error:
        raise UserError(f"--{name.replace('_', '-')} {error}" if place == COMMAND_LINE else f"{place}: `{name}` {error}") from None


@dataclass(frozen=True)
class SpeculationChoice:
    """The triple as chosen, and how: `explanation` is a phrase for the user. Its own rules are checked by the engine."""

    num_steps: int
    topk: int
    num_draft_tokens: int
    explanation: str


def choose_speculation(settings: GenerateSettings) -> SpeculationChoice:
    """Completes the triple: given parts stay, parts left out follow from them.

    The triple comes from one layer: when the command line gives a part, those of the config file are set aside. Where none is given but a
    table is, it is the first one that the table names: of the smallest batches.
    `--num-speculative-tokens K` is the chain of K. Raises UserError when it contradicts the triple.
    """
    given = {name: getattr(settings, name) for name in TRIPLE_SETTINGS if getattr(settings, name) is not None}
    from_command_line = {name: value for name, value in given.items() if settings.origin(name) == COMMAND_LINE}
    given = from_command_line or given
    if not given and (named := _first_of_table(settings)):
        return SpeculationChoice(*named, f"first of the table, {settings.origin('speculative_adaptive_config')}")
    chain = given.pop("num_speculative_tokens", None)
    if chain is not None:
        for name, expected in zip(TRIPLE_SETTINGS, (chain, 1, chain + 1), strict=False):
            if given.setdefault(name, expected) != expected:
                raise UserError(
                    f"--num-speculative-tokens {chain} and --{name.replace('_', '-')} {given[name]} contradict each other",
                    f"a chain of {chain} has steps {chain}, topk 1, draft tokens {chain + 1}: give one of the two",
                )
    steps, topk, nodes = (given.get(name) for name in TRIPLE_SETTINGS[:3])
    chosen = _complete(steps, topk, nodes)
    source = " and ".join(sorted({settings.origin(name) for name in given})) if given else DEFAULT
    derived = [word for word, part in zip(("steps", "topk", "draft tokens"), (steps, topk, nodes), strict=True) if part is None]
    return SpeculationChoice(*chosen, source + (f"; derived: {', '.join(derived)}" if given and derived else ""))


def _first_of_table(settings: GenerateSettings) -> Triple | None:
    names = [name for row in (settings.speculative_adaptive_config or {}).values() for name in row]
    return next((triple for triple in map(parse_triple, names) if triple != NO_TRIPLE), None)


def _complete(steps: int | None, topk: int | None, nodes: int | None) -> tuple[int, int, int]:
    """Fills the parts that are None; parts that are given are returned as they are, fitting or not."""
    if topk is None:
        topk = DEFAULT_TOPK
        while nodes is not None and steps is not None and nodes > steps + 1 and nodes - 1 > tree_capacity(steps, topk) and topk < nodes:
            topk += 1
    if steps is None:
        steps = DEFAULT_NUM_STEPS
        if nodes is not None:
            steps = nodes - 1 if topk == 1 else min(DEFAULT_NUM_STEPS, nodes - 1)
            while topk > 1 and nodes - 1 > tree_capacity(steps, topk):
                steps += 1
    if nodes is None:
        nodes = steps + 1 if topk == 1 else min(tree_capacity(steps, topk) + 1, max(DEFAULT_TREE_TOKENS, steps + 1))
    return steps, topk, nodes


def tree_capacity(steps: int, topk: int) -> int:
    """Nodes that a draft of `steps` levels can score, the root not counted: topk + (steps - 1) * topk^2."""
    return topk + (steps - 1) * topk**2
