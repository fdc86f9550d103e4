"""Chat templates: what models ship must work, in a sandbox, with errors that say what to do."""

from __future__ import annotations

import json
from datetime import datetime

import pytest

from router.text.chat_template import ChatTemplate, missing_template
from rpc.errors import BatonError, ErrorCode
from tests.unit.router import tokenizer_folders as folders

USER = [{"role": "user", "content": 'Hi <there> & "you" 你好'}]


def template(text: str, **tokens: str) -> ChatTemplate:
    return ChatTemplate(text, source="test", special_tokens=tokens, now=lambda: datetime(2024, 7, 26, 12, 30))


def test_chatml_when_rendered_has_the_roles_and_the_assistants_turn():
    rendered = template(folders.CHATML).render([{"role": "system", "content": "Be brief."}, *USER])
    assert rendered == (
        '<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <there> & "you" 你好<|im_end|>\n'
        "<|im_start|>assistant\n"
    )


def test_generation_prompt_when_not_wanted_is_left_out():
    rendered = template(folders.CHATML).render(USER, add_generation_prompt=False)
    assert not rendered.endswith("assistant\n")


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", '<s>Hi <there> & "you" 你好</s>'),
        ("{{ messages[0] | tojson }}", json.dumps(USER[0], ensure_ascii=False)),
        ("{{ messages[0] | tojson(indent=2) }}", json.dumps(USER[0], ensure_ascii=False, indent=2)),
        ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("a{% generation %}b{{ messages[0].role }}{% endgeneration %}c", "abuserc"),
        (
            "{%- set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
            "1",
        ),
        ("{% if tools is not none %}x{% endif %}{{ missing is defined }}", "False"),
        ("  {% if true %}\nline\n  {% endif %}\n", "line\n"),
        ("{{ messages[0]['content'].split(' ')[0] | upper | trim }}", "HI"),
    ],
)
def test_template_when_it_uses_what_models_use_renders(text, rendered):
    assert template(text, bos_token="<s>", eos_token="</s>").render(USER) == rendered


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ strftime_now.__globals__['os'] }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% include '/etc/passwd' %}",
        "{{ 1 // 0 }}",
        "{{ nothing.field }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_template_when_it_does_what_the_sandbox_forbids_or_fails_is_a_typed_error(text):
    with pytest.raises(BatonError) as caught:
        template(text).render(USER)
    assert caught.value.code is ErrorCode.INVALID_PARAMS
    assert caught.value.param == "messages"


def test_template_when_it_raises_says_what_it_refused():
    text = "{% if messages[0].role != 'user' %}{{ raise_exception('Roles must alternate') }}{% endif %}ok"
    assert template(text).render(USER) == "ok"
    with pytest.raises(BatonError) as caught:
        template(text).render([{"role": "assistant", "content": "x"}])
    assert caught.value.code is ErrorCode.INVALID_PARAMS
    assert "Roles must alternate" in caught.value.message


def test_developer_when_the_template_does_not_know_the_role_is_a_system_message():
    messages = [{"role": "developer", "content": "Be brief."}]
    assert "system" in template(folders.CHATML).render(messages)
    knows = "{% for m in messages %}{{ 'dev' if m.role == 'developer' else m.role }}{% endfor %}"
    assert template(knows).render(messages) == "dev"
    assert messages[0]["role"] == "developer"


def test_messages_when_content_is_a_template_itself_are_not_executed():
    rendered = template(folders.CHATML).render([{"role": "user", "content": "{{ 7 * 7 }}{% raw %}"}])
    assert "{{ 7 * 7 }}{% raw %}" in rendered


def test_load_when_a_jinja_file_stands_beside_the_configuration_takes_the_file(tmp_path):
    folders.chat_folder(tmp_path)
    from_config = ChatTemplate.load(tmp_path, {})
    assert from_config is not None
    assert from_config.source.endswith("tokenizer_config.json")
    (tmp_path / "chat_template.jinja").write_text("file {{ messages[0].content }}", encoding="utf-8")
    from_file = ChatTemplate.load(tmp_path, {})
    assert from_file is not None
    assert from_file.render([{"role": "user", "content": "x"}]) == "file x"


def test_load_when_templates_are_named_takes_the_default(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    folders.write_folder(tmp_path, folders.byte_level(), chat_template=named)
    loaded = ChatTemplate.load(tmp_path, {})
    assert loaded is not None
    assert loaded.render(USER) == "plain"


def test_load_when_there_is_no_template_gives_none_and_the_refusal_names_it(tmp_path):
    folders.write_folder(tmp_path, folders.byte_level())
    assert ChatTemplate.load(tmp_path, {}) is None
    error = missing_template("tiny")
    assert error.code is ErrorCode.INVALID_PARAMS
    assert "chat template" in error.message
    assert "/v1/completions" in error.message


def test_load_when_the_template_is_no_jinja_names_the_file(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{% for %}", encoding="utf-8")
    with pytest.raises(BatonError) as caught:
        ChatTemplate.load(tmp_path, {})
    assert "chat_template.jinja" in caught.value.message


def test_rendering_when_compared_with_transformers_is_the_same(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = folders.chat_folder(tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    ours = ChatTemplate.load(folder, {})
    assert ours is not None
    messages = [{"role": "system", "content": "s"}, *USER, {"role": "assistant", "content": "a"}, *USER]
    for flag in (True, False):
        theirs = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=flag)
        assert ours.render(messages, add_generation_prompt=flag) == theirs
