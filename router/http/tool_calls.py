"""Tool calls in the answers of chats: whole, and as the deltas of a stream."""

from __future__ import annotations

from typing import Any

from router.answer import TextEvent
from router.tools.formats import ToolFormat
from router.tools.parsing import CallPiece, Parsed, ToolCall, ToolCallParser, parse

TOOL_CALLS = "tool_calls"


def message_of(text: str, form: ToolFormat) -> tuple[dict[str, Any], bool]:
    """The assistant's message of a whole answer, and whether it calls anything."""
    content, calls = parse(text, form)
    if not calls:
        return {"role": "assistant", "content": content}, False
    return {"role": "assistant", "content": content or None, TOOL_CALLS: [_whole(call) for call in calls]}, True


class ToolDeltas:
    """The calls of a stream's choices, event by event."""

    def __init__(self, form: ToolFormat) -> None:
        self._form = form
        self._parsers: dict[int, ToolCallParser] = {}

    def take(self, event: TextEvent) -> tuple[str, list[dict[str, Any]], str | None]:
        """What an event brings: content, entries of the delta's `tool_calls`, and how the choice has finished."""
        parser = self._parsers.get(event.choice)
        if parser is None:
            parser = self._parsers[event.choice] = ToolCallParser(self._form)
        parsed = parser.feed(event.text)
        reason: str | None = event.finish_reason
        if reason is not None:
            rest = parser.finish()
            parsed = Parsed(parsed.content + rest.content, parsed.pieces + rest.pieces)
            reason = finish_reason(reason, bool(parser.calls))
        return parsed.content, _entries(parsed.pieces), reason


def finish_reason(reason: str | None, calls: bool) -> str | None:
    """An answer that ended by itself with calls in it ended for them."""
    return TOOL_CALLS if reason == "stop" and calls else reason


def _whole(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _entries(pieces: list[CallPiece]) -> list[dict[str, Any]]:
    """One entry for each call that there is news of."""
    entries: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        call = piece.call
        entry = entries.setdefault(call.index, {"index": call.index, "function": {"arguments": ""}})
        if piece.begins:
            entry |= {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
        entry["function"]["arguments"] += piece.arguments
    return list(entries.values())
