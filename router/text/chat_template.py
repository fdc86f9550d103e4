"""The chat template of a model folder: messages to the text that the model was trained on.

Templates are Jinja, written for `transformers`: the environment offers what they use there and no more, in
a sandbox, because a template is code that came with the weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.tools.formats import described
from rpc.errors import BatonError, ErrorCode
from rpc.vocabulary import read_json

TEMPLATE_FILE = "chat_template.jinja"


class _GenerationBlock(Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's part for training; it shows its body."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# What a template can raise by itself, on messages that it was not written for.
_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class TemplateRefusal(jinja2.TemplateError):
    """A template called `raise_exception`: the messages do not fit the model."""


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which prompts are not.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


class ChatTemplate:
    """A compiled template; `source` says where it came from, for messages. `special_tokens` are its
    variables."""

    def __init__(
        self,
        template: str,
        *,
        source: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment(now).from_string(template)
        except jinja2.TemplateError as error:
            raise BatonError(ErrorCode.INVALID_PARAMS, f"chat template {source}: {error}", param="--model") from None
        self.text = template
        self._knows_developer = "developer" in template
        self._knows_tools = "tools" in template

    @classmethod
    def load(cls, folder: Path, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
        """The template of a model folder: `chat_template.jinja`, else `chat_template` of
        `tokenizer_config.json` (one template, or a list of named ones of which `default` is taken). None
        when the model has none."""
        path = folder / TEMPLATE_FILE
        if path.is_file():
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise BatonError(ErrorCode.INVALID_PARAMS, f"{path}: {error}", param="--model") from None
            return cls(text, source=str(path), special_tokens=special_tokens)
        path = folder / "tokenizer_config.json"
        template = read_json(path).get("chat_template")
        if isinstance(template, list):
            named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
            template = named.get("default") or next(iter(named.values()), None)
        if not isinstance(template, str):
            return None
        return cls(template, source=str(path), special_tokens=special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt text, special tokens included; it is to be encoded without adding any.

        A template that knows no tools gets them, and calls, as text of the messages.

        Raises INVALID_PARAMS when the template refuses the messages or cannot be used with them.
        """
        rows = [dict(message) for message in messages] if self._knows_tools else described(messages, tools)
        if not self._knows_developer:
            for row in rows:
                if row.get("role") == "developer":
                    row["role"] = "system"
        try:
            return self._template.render(
                messages=rows,
                add_generation_prompt=add_generation_prompt,
                tools=[dict(tool) for tool in tools] or None,
                documents=None,
                **self._special_tokens,
            )
        except TemplateRefusal as error:
            raise _refused(f"the model's chat template refuses these messages: {error}") from None
        except _FAILURES as error:
            detail = f"{type(error).__name__}: {error}"
            raise _refused(f"the model's chat template fails on these messages ({detail})") from None


def _refused(message: str) -> BatonError:
    return BatonError(ErrorCode.INVALID_PARAMS, message, param="messages")


def missing_template(model: str) -> BatonError:
    """What a chat request gets when the model has no template."""
    return BatonError(
        ErrorCode.INVALID_PARAMS,
        f"model {model} has no chat template (neither {TEMPLATE_FILE} nor chat_template in "
        "tokenizer_config.json); use /v1/completions",
        param="messages",
    )
