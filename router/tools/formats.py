"""How models write their calls, as text, and the grammars that hold them to it.

hermes       <tool_call>{"name": …, "arguments": {…}}</tool_call>, as often as there are calls
llama3_json  {"name": …, "parameters": {…}}, perhaps behind <|python_tag|>, several with ; between them
mistral      [TOOL_CALLS][{"name": …, "arguments": {…}}, …]
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from router.grammar.keys import AskedGrammar, wrong
from router.tools.request import Tool, ToolRequest
from rpc.errors import BatonError, ErrorCode
from rpc.grammar import MAX_GRAMMAR_BYTES, MAX_WHITESPACE, GrammarKind, GrammarSpec
from rpc.json_schema_support import SchemaBudget, UnsupportedSchema, check_schema
from rpc.vocabulary import TOOL_MARKERS

FormatName = Literal["hermes", "llama3_json", "mistral"]

HERMES_BEGIN, HERMES_END, PYTHON_TAG, MISTRAL_BEGIN = TOOL_MARKERS


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One of the forms."""

    name: FormatName
    arguments_key: str


FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat("hermes", "arguments"),
    "llama3_json": ToolFormat("llama3_json", "parameters"),
    "mistral": ToolFormat("mistral", "arguments"),
}


def format_of(template: str) -> ToolFormat:
    """The form that a chat template teaches the model; hermes where it teaches none."""
    if MISTRAL_BEGIN in template:
        return FORMATS["mistral"]
    if HERMES_BEGIN not in template and (PYTHON_TAG in template or '"parameters"' in template):
        return FORMATS["llama3_json"]
    return FORMATS["hermes"]


def tool_grammar(request: ToolRequest, form: ToolFormat) -> AskedGrammar | None:
    """What holds the answer to calls of the tools; None where the model is free.

    With `auto` that is so unless a tool is strict and the form marks its calls: then text is free, and calls keep to
    the schemas. Raises ERROR_GENERATE_CONFIG_FORMAT for the schema of a strict tool that cannot be kept to, and for
    schemas that are larger than a grammar may be.
    """
    if request.choice == "auto" and (form.name != "hermes" or not any(tool.strict for tool in request.tools)):
        return None
    size = len(msgspec.json.encode([tool.parameters for tool in request.tools]))
    if size > MAX_GRAMMAR_BYTES:
        raise wrong("tools", f"the parameters of tools are {size} bytes long; at most {MAX_GRAMMAR_BYTES} are allowed")
    budget = SchemaBudget()
    tags = [_tag(tool, form, budget) for tool in request.tools]
    if request.choice == "auto":
        content: dict[str, Any] = {
            "type": "triggered_tags",
            "triggers": [HERMES_BEGIN],
            "tags": tags,
            "stop_after_first": not request.parallel,
        }
    else:
        content = {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": {"hermes": "\n", "llama3_json": "; ", "mistral": ", "}[form.name],
            "at_least_one": True,
            "stop_after_first": not request.parallel,
        }
    if form.name == "mistral":
        content = {"type": "sequence", "elements": [_const(MISTRAL_BEGIN + "["), content, _const("]")]}
    text = json.dumps({"type": "structural_tag", "format": content}, ensure_ascii=False, separators=(",", ":"))
    return AskedGrammar(GrammarSpec(GrammarKind.STRUCTURAL_TAG, text), "tools")


def _const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def _tag(tool: Tool, form: ToolFormat, budget: SchemaBudget) -> dict[str, Any]:
    head = f'{{"name": "{tool.name}", "{form.arguments_key}": '
    begin, end = (f"{HERMES_BEGIN}\n{head}", f"}}\n{HERMES_END}") if form.name == "hermes" else (head, "}")
    content = {"type": "json_schema", "json_schema": _schema(tool, budget), "max_whitespace_cnt": MAX_WHITESPACE}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _schema(tool: Tool, budget: SchemaBudget) -> Mapping[str, Any]:
    """Of the arguments: the tool's own, or any object where it is not strict and its schema cannot be kept to."""
    schema = tool.parameters if tool.parameters is not None else {"type": "object", "properties": {}}
    try:
        check_schema(schema, budget)
    except UnsupportedSchema as error:
        if not tool.strict:
            return {"type": "object"}
        raise BatonError(
            ErrorCode.ERROR_GENERATE_CONFIG_FORMAT,
            f"the parameters of the strict tool {tool.name}, at {error.pointer}: {error}",
            param="tools",
            metadata={"cause": "grammar", "pointer": error.pointer},
        ) from None
    return schema if schema.get("type") == "object" else {"type": "object"}


# -- for templates that know no tools -------------------------------------------------------------------------------

_INTRODUCTION = """You may call functions. They are described here as JSON, one a line:
{tools}
To call one, answer with a line like this for each call, and nothing else:
<tool_call>
{{"name": "the function", "arguments": {{"of": "the call"}}}}
</tool_call>"""


def described(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages for a template that knows no tools: what there is to call stands in the system's message, calls of
    the assistant in its text."""
    rows = [_as_text(message) for message in messages]
    if not tools:
        return rows
    listed = "\n".join(json.dumps(tool.get("function"), ensure_ascii=False) for tool in tools)
    introduction = _INTRODUCTION.format(tools=listed)
    if rows and rows[0].get("role") in ("system", "developer"):
        rows[0]["content"] = f"{rows[0].get('content') or ''}\n\n{introduction}".lstrip()
        return rows
    return [{"role": "system", "content": introduction}, *rows]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    row = dict(message)
    calls = row.pop("tool_calls", None)
    if calls:
        written = [f"{HERMES_BEGIN}\n{json.dumps(_written(call), ensure_ascii=False)}\n{HERMES_END}" for call in calls]
        row["content"] = "\n".join([*filter(None, [row.get("content")]), *written])
    return row


def _written(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
