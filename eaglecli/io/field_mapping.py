"""Fields under the names that the reader knows: --prompt-field, --id-field, --map target=source, --prompt-template."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eaglecli.errors import UserError
from eaglecli.io.json_record import describe_type
from eaglecli.io.records import RecordFault

PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
MISSING = object()


@dataclass(frozen=True)
class FieldMapping:
    """`sources`: dotted path of the field that stands for each target. `template`: text with {field}, or None."""

    sources: Mapping[str, str] = field(default_factory=dict)
    template: str | None = None

    def apply(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """The record with mapped fields in place. A target whose source is missing is missing: no other field steps in."""
        if not self.sources and self.template is None:
            return fields
        mapped = {name: value for name, value in fields.items() if name not in self.sources}
        for target, path in self.sources.items():
            value = look_up(fields, path)
            if value is not MISSING:
                mapped[target] = value
        if self.template is not None:
            mapped["prompt"] = fill_template(self.template, mapped)
        return mapped


def look_up(fields: Any, path: str) -> Any:
    """The value at a dotted path: a key of that very name first, then step by step; numbers count in arrays. MISSING if there is none."""
    if isinstance(fields, Mapping) and path in fields:
        return fields[path]
    head, dot, rest = path.partition(".")
    if isinstance(fields, list) and head.isdecimal():
        value = fields[int(head)] if int(head) < len(fields) else MISSING
    else:
        value = fields.get(head, MISSING) if isinstance(fields, Mapping) else MISSING
    return look_up(value, rest) if dot and value is not MISSING else value


def fill_template(template: str, fields: Mapping[str, Any]) -> str:
    """The template with each {field} replaced once: what a field holds is never looked at for braces. Raises RecordFault."""

    def replace(found: re.Match[str]) -> str:
        if found[0] in ("{{", "}}"):
            return found[0][0]
        return _as_text(look_up(fields, found[1]), found[1], fields)

    return PLACEHOLDER.sub(replace, template)


def check_template(template: str) -> str:
    """The template. Raises ValueError for braces that are not closed or empty."""
    for found in PLACEHOLDER.finditer(template):
        if found[0] in ("{", "}") or (found[1] is not None and not found[1].strip()):
            raise ValueError(f"has a stray `{found[0]}` at character {found.start() + 1}: write {{field}}, or {{{{ and }}}} for braces")
    return template


def parse_mapping(pairs: Sequence[str], prompt_field: str | None, id_field: str | None) -> dict[str, str]:
    """Sources by target. Raises UserError for a pair that is none, and for a target given twice."""
    given = [pair.partition("=") for pair in pairs]
    wrong = next((pair for pair, (target, equals, source) in zip(pairs, given, strict=True) if not (target and equals and source)), None)
    if wrong is not None:
        raise UserError(f"--map {wrong} is not target=source", "write for example --map prompt=question.text")
    flags = [(target, source) for target, source in (("prompt", prompt_field), ("id", id_field)) if source is not None]
    sources: dict[str, str] = {}
    for target, source in [*flags, *((target, source) for target, _, source in given)]:
        if target in sources:
            raise UserError(f"two fields are named for `{target}`: `{sources[target]}` and `{source}`", "name one")
        sources[target] = source
    return sources


def _as_text(value: Any, path: str, fields: Mapping[str, Any]) -> str:
    if value is MISSING or value is None:
        there = ", ".join(f"`{str(name)[:40]}`" for name in list(fields)[:12]) or "none"
        state = "is null" if value is None else f"is not there; the keys there are: {there}"
        raise RecordFault("missing_prompt", f"the prompt template needs `{path}`, which {state}")
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return json.dumps(value)
    raise RecordFault("bad_type", f"the prompt template needs text in `{path}`, which is {describe_type(value)}")
