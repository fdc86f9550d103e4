"""Tools of a chat: what is checked, what the model is told, the grammars that hold it, and calls read back."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from router.answer import AnswerRequest, ChoiceText
from router.http.schemas import ChatBody
from router.open_requests import OpenRequests
from router.requests import ModelFacts, Token
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer
from router.tools.formats import FORMATS, format_of, tool_grammar
from router.tools.parsing import ToolCallParser, parse
from router.tools.request import ToolRequest, read_tools
from router.validation import GenerationParams, RequestValidator
from rpc.errors import BatonError, ErrorCode
from rpc.grammar import MAX_GRAMMAR_BYTES
from rpc.grammar_compiler import GrammarCompiler
from rpc.metrics import Registry
from rpc.vocabulary import Vocabulary
from tests.unit.router import tokenizer_folders

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
USER = {"role": "user", "content": "Weather in Paris?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}

HALF = r'{"half a character": "\ud800"}'


def tool(name: str = "weather", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": PARAMETERS, **function}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("fields", "names", "choice", "parallel"),
    [
        ({}, None, "", True),
        ({"tool_choice": "none"}, None, "", True),
        ({"tools": [tool()]}, ["weather"], "auto", True),
        ({"tools": [tool()], "tool_choice": "none"}, None, "", True),
        ({"tools": [tool(), tool("time")], "tool_choice": "required"}, ["weather", "time"], "required", True),
        ({"tools": [tool()], "tool_choice": "auto", "parallel_tool_calls": False}, ["weather"], "auto", False),
        ({"tools": [tool(), tool("time")], "tool_choice": named("time")}, ["time"], "named", False),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, ["f"], "auto", True),
    ],
)
def test_tools_when_they_are_well_formed_then_they_are_read(
    fields: dict[str, Any], names: list[str] | None, choice: str, parallel: bool
) -> None:
    found = ChatBody.parse({"messages": [USER], **fields}).params().tools
    if names is None:
        assert found is None
    else:
        assert found is not None and [item.name for item in found.tools] == names
        assert (found.choice, found.parallel) == (choice, parallel)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [tool("two words")]}, "tools"),
        ({"tools": [tool(parameters=[])]}, "tools"),
        ({"tools": [tool(strict="yes")]}, "tools"),
        ({"tools": [tool(description=3)]}, "tools"),
        ({"tools": [tool(), tool()]}, "tools"),
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": named("time")}, "tool_choice"),
        ({"tools": [tool()], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"messages": [USER, {"role": "tool", "content": "18 C"}]}, "messages"),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": HALF}}]}]},
            "messages",
        ),
    ],
)
def test_tools_when_something_is_malformed_then_a_400_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BatonError) as caught:
        ChatBody.parse({"messages": [USER], **fields}).params()
    assert caught.value.spec.http == 400 and caught.value.param == param
    assert caught.value.code in (ErrorCode.ERROR_GENERATE_CONFIG_FORMAT, ErrorCode.INVALID_PARAMS)


# -- what the model is told --------------------------------------------------------------------------------------

KNOWS_TOOLS = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}:{{ call.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}"
)
KNOWS_NONE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def rendered(template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    params = ChatBody.parse({"messages": messages, "tools": tools or None}).params()
    made = ChatTemplate(template, source="test", special_tokens={})
    assert params.messages is not None
    return made.render(params.messages, tools=params.tools.offered if params.tools else ())


HISTORY = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "18 C"},
]


def test_template_when_it_knows_tools_then_gets_them_and_arguments_as_objects() -> None:
    text = rendered(KNOWS_TOOLS, HISTORY, [tool(), tool("time")])
    assert text == '[weather][time]<user>Weather in Paris?<assistant>weather:{"city": "Paris"}<tool>18 C'
    assert rendered(KNOWS_TOOLS, [USER], []) == "<user>Weather in Paris?"


def test_template_when_it_knows_no_tools_then_they_and_the_calls_stand_in_the_text() -> None:
    text = rendered(KNOWS_NONE, HISTORY, [tool()])
    assert text.startswith("<system>") and json.dumps(tool()["function"]) in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>' in text
    assert text.endswith("<tool>18 C")
    with_system = rendered(KNOWS_NONE, [{"role": "system", "content": "Be brief."}, USER], [tool()])
    assert with_system.startswith("<system>Be brief.\n\nYou may call functions") and with_system.count("<system>") == 1
    assert rendered(KNOWS_NONE, [USER], []) == "<user>Weather in Paris?"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("… <tool_call> …", "hermes"),
        ("… <|python_tag|> …", "llama3_json"),
        ('{"name": …, "parameters": …}', "llama3_json"),
        ("[AVAILABLE_TOOLS] … [TOOL_CALLS] …", "mistral"),
        ("{{ messages }}", "hermes"),
    ],
)
def test_format_when_a_template_shows_one_then_it_is_found(template: str, name: str) -> None:
    assert format_of(template).name == name


def test_marker_when_it_is_a_special_token_then_it_is_shown_where_calls_may_come_and_only_there() -> None:
    backend = tokenizer_folders.byte_level()
    backend.add_special_tokens(["[TOOL_CALLS]", "<|other|>"])
    tokenizer = Tokenizer(backend, {"eos_token": "<|im_end|>"})
    try:
        template = ChatTemplate("{{ tools }} [TOOL_CALLS]", source="test", special_tokens={})
        facts = ModelFacts(("tiny",), "", vocab_size=tokenizer.vocab_size, eos_token_ids=(0,))
        validator = RequestValidator(tokenizer, template, lambda: facts)
        assert validator.tool_format.name == "mistral"
        ids = tokenizer.encode("a[TOOL_CALLS][]<|other|>b", add_special_tokens=False)
        assert len(set(ids) & tokenizer.special_ids) == 2
        for fields, shown in (({"tools": [tool()]}, "a[TOOL_CALLS][]b"), ({}, "a[]b")):
            params = ChatBody.parse({"messages": [USER], **fields}).params()
            request = answer_request(validator, params)
            text = ChoiceText(tokenizer, request, 0)
            assert text.push(0, [Token(index, token) for index, token in enumerate(ids)]).text == shown
    finally:
        tokenizer.close()


def answer_request(validator: RequestValidator, params: GenerationParams) -> AnswerRequest:
    metrics = Registry("router")
    opened = OpenRequests(metrics, request_timeout_s=60, served_names=lambda: ("tiny",))
    with opened.open("r", api="chat", model="tiny", stream=False) as owner:
        validator.check(params)
        request = asyncio.run(validator.prepare(params, owner))
        owner.finish("stop")
    return request


# -- grammars ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    vocabulary = Vocabulary((*(bytes([i]) for i in range(256)), b""), frozenset({256}))
    return GrammarCompiler(vocabulary, vocab_size=257, stop_token_ids=(256,), cache_bytes=1 << 24)


def asked(**fields: Any) -> ToolRequest:
    found = read_tools(fields["tools"], fields.get("tool_choice"), fields.get("parallel"))
    assert found is not None
    return found


ONE = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Paris"}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}]',
}
TWO = {
    "hermes": ONE["hermes"] + "\n" + ONE["hermes"],
    "llama3_json": ONE["llama3_json"] + "; " + ONE["llama3_json"],
    "mistral": ONE["mistral"][:-1] + ", " + ONE["mistral"][len("[TOOL_CALLS][") :],
}


@pytest.mark.parametrize("form", list(FORMATS))
def test_grammar_when_calls_are_required_then_holds_to_calls_that_are_read_back(
    compiler: GrammarCompiler, form: str
) -> None:
    def accepts(request: ToolRequest, text: str) -> bool:
        grammar = tool_grammar(request, FORMATS[form])
        assert grammar is not None and grammar.field == "tools"
        matcher = compiler.library.GrammarMatcher(compiler.compile(grammar.spec))
        return bool(matcher.accept_string(text) and matcher.is_completed())

    required = asked(tools=[tool(), tool("time", parameters=None)], tool_choice="required")
    alone = asked(tools=[tool()], tool_choice="required", parallel=False)
    assert accepts(required, ONE[form]) and accepts(required, TWO[form])
    assert accepts(alone, ONE[form]) and not accepts(alone, TWO[form])
    for text in ("", "Hello", ONE[form].replace("weather", "snow"), ONE[form].replace('"city"', '"town"')):
        assert not accepts(required, text)
    assert accepts(asked(tools=[tool("time"), tool()], tool_choice=named("weather")), ONE[form])
    assert not accepts(asked(tools=[tool("time"), tool()], tool_choice=named("time")), ONE[form])
    for text, count in ((ONE[form], 1), (TWO[form], 2)):
        content, calls = parse(text, FORMATS[form])
        assert content == "" and [(c.name, c.arguments) for c in calls] == [("weather", '{"city": "Paris"}')] * count


def test_grammar_when_the_choice_is_the_models_then_only_calls_of_strict_tools_are_held(
    compiler: GrammarCompiler,
) -> None:
    assert tool_grammar(asked(tools=[tool()]), FORMATS["hermes"]) is None
    assert tool_grammar(asked(tools=[tool(strict=True)]), FORMATS["mistral"]) is None
    grammar = tool_grammar(asked(tools=[tool(strict=True)]), FORMATS["hermes"])
    assert grammar is not None
    compiled = compiler.compile(grammar.spec)
    for text, good in (("Hello.", True), ("So: " + ONE["hermes"], True), ('<tool_call>\n{"name": "x"', False)):
        matcher = compiler.library.GrammarMatcher(compiled)
        assert (matcher.accept_string(text) and matcher.is_completed()) is good


def test_grammar_when_a_schema_cannot_be_kept_to_then_only_a_strict_tool_is_refused() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    loose = tool_grammar(asked(tools=[tool(parameters=odd)], tool_choice="required"), FORMATS["hermes"])
    assert loose is not None and '"json_schema":{"type":"object"}' in loose.spec.text
    with pytest.raises(BatonError) as caught:
        tool_grammar(asked(tools=[tool(parameters=odd, strict=True)], tool_choice="required"), FORMATS["hermes"])
    assert caught.value.code is ErrorCode.ERROR_GENERATE_CONFIG_FORMAT
    assert caught.value.metadata["pointer"] == "/properties/a/uniqueItems"


def test_grammar_when_the_schemas_of_tools_are_larger_than_a_grammar_then_they_are_refused() -> None:
    half = {"type": "object", "description": "x" * (MAX_GRAMMAR_BYTES // 2)}
    both = [tool(name, parameters=half) for name in ("f", "g")]
    assert tool_grammar(asked(tools=both), FORMATS["hermes"]) is None  # nothing is held to them
    with pytest.raises(BatonError, match="at most 1048576") as caught:
        tool_grammar(asked(tools=both, tool_choice="required"), FORMATS["hermes"])
    assert caught.value.param == "tools"


# -- reading calls -----------------------------------------------------------------------------------------------

TEXTS = [
    (
        "hermes",
        'Let me see. <tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
        '<tool_call>{"arguments": {"x":1}, "name": "g"}</tool_call> done',
        "Let me see. done",
        [("f", "{}"), ("g", '{"x":1}')],
    ),
    (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {"c": "Pa\\"}ris", "n": [1,{"a":2}]}}\n</tool_call>',
        "",
        [("f", '{"c": "Pa\\"}ris", "n": [1,{"a":2}]}')],
    ),
    ("hermes", "a <b> <tool_cal and <tool_call> none", "a <b> <tool_cal and <tool_call> none", []),
    ("hermes", '<tool_call>{"nam": 3}</tool_call>', '<tool_call>{"nam": 3}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "cut', "", [("f", '{"a": "cut')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"na', '<tool_call>{"na', []),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {"b": "x;y"}}',
        "",
        [("f", '{"a": 1}'), ("g", '{"b": "x;y"}')],
    ),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ("llama3_json", 'Hello {"name": "f", "parameters": {"a": 1}}', 'Hello {"name": "f", "parameters": {"a": 1}}', []),
    ("llama3_json", '{"answer": 42} and more', '{"answer": 42} and more', []),
    ("llama3_json", "  \n<|pyth", "  \n<|pyth", []),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1,2]}, "id": "x"}, {"name": "g", "arguments": {}}]',
        "",
        [("f", '{"a": [1,2]}'), ("g", "{}")],
    ),
    ("mistral", "Hi [TOOL_CALLS] none", "Hi [TOOL_CALLS] none", []),
    ("mistral", "see [TOOL", "see [TOOL", []),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(("form", "text", "content", "calls"), TEXTS, ids=[f"{t[0]}-{i}" for i, t in enumerate(TEXTS)])
def test_parser_when_text_comes_in_pieces_then_content_and_calls_are_those_of_the_whole(
    form: str, text: str, content: str, calls: list[tuple[str, str]], size: int
) -> None:
    parser = ToolCallParser(FORMATS[form])
    brought = [parser.feed(text[at : at + size]) for at in range(0, len(text), size)] + [parser.finish()]
    assert "".join(parsed.content for parsed in brought) == content
    assert [(call.name, call.arguments) for call in parser.calls] == calls
    pieces = [piece for parsed in brought for piece in parsed.pieces]
    assert [piece.call.name for piece in pieces if piece.begins] == [name for name, _ in calls]
    for call in parser.calls:
        assert "".join(piece.arguments for piece in pieces if piece.call is call) == call.arguments
    assert len({call.id for call in parser.calls}) == len(calls)
