"""`tools`, `tool_choice` and `parallel_tool_calls` of a chat, checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from router.grammar.keys import wrong
from rpc.errors import BatonError, ErrorCode

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)

Choice = Literal["auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `raw` is as the client wrote it, for the chat template."""

    name: str
    parameters: Mapping[str, Any] | None  # JSON schema of its arguments; None: it takes none
    strict: bool
    raw: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """Tools that the model may call in this answer; `auto` leaves it to the model, the others do not."""

    tools: tuple[Tool, ...]
    choice: Choice = "auto"
    parallel: bool = True  # more than one call in an answer

    @property
    def offered(self) -> list[Mapping[str, Any]]:
        """As the chat template gets them."""
        return [tool.raw for tool in self.tools]


def read_tools(tools: Any, tool_choice: Any, parallel: Any) -> ToolRequest | None:
    """What the fields of a chat say; None: the model is to call nothing, and is told of no tool.

    Raises ERROR_GENERATE_CONFIG_FORMAT for what is malformed, INVALID_PARAMS for a choice that is no tool of the
    request.
    """
    if parallel is not None and not isinstance(parallel, bool):
        raise wrong("parallel_tool_calls", "parallel_tool_calls must be true or false")
    if tools is None:
        if tool_choice not in (None, "none", "auto"):
            raise wrong("tool_choice", "tool_choice needs tools")
        return None
    if not isinstance(tools, list) or not tools:
        raise wrong("tools", "tools must be a list of at least one tool")
    if len(tools) > MAX_TOOLS:
        raise wrong("tools", f"tools has {len(tools)} entries; at most {MAX_TOOLS} are allowed")
    known = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    names = [tool.name for tool in known]
    if len(set(names)) < len(names):
        raise wrong("tools", "tools has two functions of the same name")
    several = parallel is not False
    if tool_choice is None or tool_choice == "auto":
        return ToolRequest(known, "auto", several)
    if tool_choice == "none":
        return None
    if tool_choice == "required":
        return ToolRequest(known, "required", several)
    name = _chosen(tool_choice)
    chosen = tuple(tool for tool in known if tool.name == name)
    if not chosen:
        raise BatonError(
            ErrorCode.INVALID_PARAMS,
            f"tool_choice names {name!r}; it must be one of the tools: {', '.join(names)}",
            param="tool_choice",
        )
    return ToolRequest(chosen, "named", False)


def _chosen(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise wrong(
            "tool_choice",
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}',
        )
    return name


def _tool(tool: Any, place: str) -> Tool:
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("function"), Mapping):
        raise wrong("tools", f'{place} must be an object of type "function" with a function')
    function = tool["function"]
    name, parameters, strict = function.get("name"), function.get("parameters"), function.get("strict")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise wrong("tools", f"{place}.function.name must be 1 to 64 letters, digits, _ and -")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise wrong("tools", f"{place}.function.parameters must be a JSON schema, an object")
    if function.get("description") is not None and not isinstance(function["description"], str):
        raise wrong("tools", f"{place}.function.description must be a string")
    if strict is not None and not isinstance(strict, bool):
        raise wrong("tools", f"{place}.function.strict must be true or false")
    return Tool(name, parameters, bool(strict), tool)


def check_tool_message(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A message of a chat, with the arguments of the calls in it as objects, as chat templates want them.

    Raises ERROR_GENERATE_CONFIG_FORMAT for calls, or an answer to one, that are malformed.
    """
    if message.get("role") == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise wrong("messages", f"{place}.tool_call_id must be a string: the id of the call that it answers")
    calls = message.get("tool_calls")
    if calls is None:
        return dict(message)
    if message.get("role") != "assistant" or not isinstance(calls, Sequence) or isinstance(calls, str) or not calls:
        raise wrong("messages", f"{place}.tool_calls must be a list of calls, in a message of the assistant")
    read = [_call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return {**message, "tool_calls": read}


def _call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or call.get("type", "function") != "function" or not isinstance(function, Mapping):
        raise wrong("messages", f'{place} must be an object of type "function" with a function')
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise wrong("messages", f"{place}.function.name must be a string")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
            json.dumps(arguments, ensure_ascii=False).encode()  # half a character cannot be written into a prompt
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        raise wrong("messages", f"{place}.function.arguments must be the JSON text of an object")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}
