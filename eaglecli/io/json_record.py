"""One line of bytes to one JSON object, or a RecordFault that says in a sentence what is wrong with it."""

import json
import re
from typing import Any

from eaglecli.io.lines import Line, decode_line
from eaglecli.io.records import MAX_RAW_CHARACTERS, RecordFault

TRAILING_COMMA = re.compile(r",\s*[}\]]")


class _ObjectWithRepeatedKey(dict[str, Any]):
    """An object in which a key appears twice: json would keep the last one without a word."""

    def __init__(self, pairs: list[tuple[str, Any]], repeated_key: str) -> None:
        super().__init__(pairs)
        self.repeated_key = repeated_key


def parse_record(line: Line, encoding: str = "utf-8") -> dict[str, Any]:
    """The object on the line. Raises RecordFault (encoding, invalid_json, not_object)."""
    text = decode_line(line, encoding)
    try:
        value = DECODER.decode(text)
    except json.JSONDecodeError as error:
        at = None if line.byte_offset is None else line.byte_offset + len(text[: error.pos].encode(encoding, errors="replace"))
        raise RecordFault("invalid_json", f"not JSON: {_explain(text, error)}", at) from None
    except RecursionError:
        raise RecordFault("invalid_json", "not usable JSON: nested too deeply", line.byte_offset) from None
    except ValueError as error:  # an integer of more digits than Python converts
        raise RecordFault("invalid_json", f"not usable JSON: {error}", line.byte_offset) from None
    if not isinstance(value, dict):
        raise RecordFault("not_object", f"a record must be a JSON object, this line is {describe_type(value)}", line.byte_offset)
    refuse_repeated_key(value)
    return value


def refuse_repeated_key(value: dict[str, Any]) -> None:
    """Raises RecordFault when a key appears twice in this object (objects inside it are not looked at)."""
    if isinstance(value, _ObjectWithRepeatedKey):
        raise RecordFault("invalid_json", f"the key `{value.repeated_key}` appears twice in one object")


def raw_excerpt(line: Line) -> str:
    """The line for an error report: bytes that are no UTF-8 are shown as \\xNN, nothing is replaced or hidden."""
    return line.data[: 4 * MAX_RAW_CHARACTERS].decode("utf-8", errors="backslashreplace")[:MAX_RAW_CHARACTERS]


def describe_type(value: Any) -> str:
    """JSON's own word for the type of a value, with its article."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    for kind, name in ((str, "a string"), (int, "a number"), (float, "a number"), (list, "an array"), (dict, "an object")):
        if isinstance(value, kind):
            return name
    return type(value).__name__


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) == len(pairs):
        return built
    seen: set[str] = set()
    repeated = next(key for key, _ in pairs if key in seen or seen.add(key))
    return _ObjectWithRepeatedKey(pairs, repeated)


DECODER = json.JSONDecoder(object_pairs_hook=_build_object)  # making one costs more than using it


def _explain(text: str, error: json.JSONDecodeError) -> str:
    """The parser's finding in the words of the mistake that people make."""
    rest = text[error.pos :].strip()
    if error.msg == "Extra data":
        return "trailing comma after the object" if rest == "," else "more than one value on the line"
    before_comma = text[: error.pos].rstrip().removesuffix(",")
    if TRAILING_COMMA.match(text[len(before_comma) :].lstrip()):
        return f"trailing comma inside the object at character {len(before_comma) + 1}"
    if error.msg.startswith("Unterminated string"):
        return f"the line ends inside a string that begins at character {error.pos + 1}"
    if text.startswith(("#", "//")):
        return "a comment is no record"
    finding = error.msg.removesuffix(" at")
    return f"{finding[:1].lower()}{finding[1:]} at character {error.pos + 1}"
