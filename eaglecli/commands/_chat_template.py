"""The tokenizer as the settings want it: another chat template, variables for it, a system prompt that it can render."""

from pathlib import Path

from eaglecli.config import GenerateSettings
from eaglecli.errors import UserError
from eaglecli.io.tokenizer import PromptTokenizer


def prepare_tokenizer(tokenizer: PromptTokenizer, settings: GenerateSettings) -> PromptTokenizer:
    """The tokenizer with the settings' template. Raises UserError before weights are loaded for what could not work for any record."""
    if settings.chat_template is not None or settings.chat_template_kwargs:
        tokenizer = tokenizer.with_template(read_chat_template(settings), settings.chat_template_kwargs or {})
    if settings.system_prompt is not None and not (tokenizer.has_chat_template and settings.apply_chat_template):
        raise UserError(
            "--system-prompt needs a chat template, and none is used", "give one with --chat-template, or put it into the prompts"
        )
    return tokenizer


def read_chat_template(settings: GenerateSettings) -> str | None:
    """The text of --chat-template. Raises UserError."""
    if settings.chat_template is None:
        return None
    try:
        return Path(settings.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"--chat-template {settings.chat_template} cannot be read: {reason}", "name a file with a Jinja template"
        ) from error
