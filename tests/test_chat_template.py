from __future__ import annotations

import json
import re
import sys
from datetime import datetime
from pathlib import Path

import jinja2
import jinja2.sandbox
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_cuda import template_process
from minfer_cuda.chat_template import ChatTemplate
from minfer_cuda.errors import TemplateError, TokenizerError, UsageError
from minfer_cuda.gguf import GGUFFile
from minfer_cuda.gguf_header import Strings

KEY = "tokenizer.chat_template"
HI = [{"role": "user", "content": "Hi"}]
TURNS = [
    {"role": "system", "content": ""},
    {"role": "user", "content": " a\n"},
    {"role": "assistant", "content": "<think>\nwhy?\n</think>\n\nbecause"},
    {"role": "user", "content": "b <|im_end|>"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": '<a> & "b" 天', "n": 1.0}}]
PLAIN = (
    "{% for m in messages %}\n"
    "    {{- '<|im_start|>' + m.role + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLED = "{% for t in tools %}{{ t | tojson }}\n{% endfor %}" + PLAIN
THINKING = (  # thoughts leave the history, as in the R1 distills and QwQ
    "{{ bos_token }}{% for m in messages %}{% set content = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
TRIMMED = "{% for m in messages %}<|im_start|>{{ m.content | trim | upper }}{% endfor %}"
ESCAPED = "{% for m in messages %}<|im_start|>{{ m.content | replace('<', '&lt;') }}{% endfor %}"
JOINED = "{% for m in messages %}{{ m.content }}{% endfor %}<|im_start|>assistant\n"
WRAPPED = "{% for t in tools %}<{{ t.name }}>{% endfor %}" + PLAIN
FAMILIES = [PLAIN, TOOLED, THINKING, TRIMMED, ESCAPED, JOINED]

SPELLINGS = ["<|im_end|>", "<|im_start|>", "<think>", "</think>", "<tool_call>", "<|fim_prefix|>"]
CONTENT = st.lists(st.sampled_from([*SPELLINGS, "<", "|", ">", "im_end", "<|im_", " ", "\n", "a"]))
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system"]),
            "content": CONTENT.map("".join) | st.text(max_size=8),
        }
    ),
    max_size=4,
)


def hugging_face(source, messages, **variables):
    """How `apply_chat_template` sets up Jinja."""

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            x,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = tojson
    return environment.from_string(source).render(messages=messages, **variables)


def control_ids(tokenizer, ids):
    return [i for i in ids if tokenizer.is_control(i)]


@pytest.mark.parametrize("source", FAMILIES)
@pytest.mark.parametrize("messages", [HI, TURNS, TURNS[1:]])
@pytest.mark.parametrize("generation", [True, False])
def test_templates_render_as_hugging_face_renders_them(source, messages, generation):
    variables = {"tools": TOOLS, "add_generation_prompt": generation}
    expected = hugging_face(source, messages, bos_token="<b>", **variables)
    assert ChatTemplate(source, bos_text="<b>").render(messages, **variables) == expected


@pytest.mark.parametrize(
    "call", ["", "(indent=2)", "(ensure_ascii=true)", "(separators=(',', ':'))", "(sort_keys=true)"]
)
def test_tojson_equals_that_of_hugging_face(call):
    value = {"b": [1, 1.0, None, True, "<é😀\ue000\n\"'&>"], "a": {"x": "\u2028"}, "e": {}, "f": []}
    source = "{{ tools | tojson" + call + " }}"
    private_kept = hugging_face(source, [], tools=value).replace("\\ue000", "\ue000")
    assert ChatTemplate(source).render([], tools=value) == private_kept


@pytest.mark.parametrize(
    "expression",
    [
        "x.rsplit(',', 1)[-1].strip()",
        "x.removeprefix('a').removesuffix(',c ')",
        "'-'.join(x.partition(',')) ~ x.zfill(9)",
        "messages[0].content.rsplit('i'.removesuffix(')'))[0]",
        "messages[0]['content'].center( 1 + (3) ) if x.rsplit(',')|length > 2 else x.swapcase()",
        "not 'a'.rpartition('.')[0] and x in x.ljust(9)",
        "(x ~ 'b').rsplit('b')[0] ~ [x.upper().rsplit(',')][0][1]",
        "x.rsplit(sep=',', maxsplit=1)[0]",
    ],
)
def test_string_methods_of_python_that_the_engine_lacks(expression):
    source = "{% set x = ' a,b,c ' %}.rsplit('{{ " + expression + " }}' {{- x.rsplit(',')[2] }}"
    assert ChatTemplate(source).render(HI) == hugging_face(source, HI)


def test_generation_tags_do_not_change_the_text():
    tagged = "a\n  {% generation %}\nb{%- endgeneration -%} \nc\n"
    plain = "a\n  {% if true %}\nb{%- endif -%} \nc\n"
    assert ChatTemplate(tagged).render([]) == hugging_face(plain, [])


def test_the_clock_can_be_set():
    template = ChatTemplate("{{ strftime_now('%d %b %Y %H:%M:%S') }}")
    template.clock = lambda: datetime(2024, 2, 3, 4, 5, 6)
    assert template.render(HI) == "03 Feb 2024 04:05:06"


def test_what_the_template_rejects_is_an_error_with_its_words():
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('no system!') }}{% endif %}x"
    template = ChatTemplate(source)
    assert template.render(HI) == "x"
    with pytest.raises(TemplateError, match="no system!"):
        template.render(TURNS)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% for %}", "syntax error.*chat_template:1"),
        ("{{ messages[0].content.no_such_method('a') }}", "no_such_method"),
        ("{{ no_such_function() }}", "no_such_function"),
        ("{{ raise_exception('never') }}", "never"),
        (
            "{% if messages | length > 1 %}{{ 'a'.no_such_method('b') }}{% endif %}",
            "no_such_method",
        ),
        (
            "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
            "fuel",
        ),
        ("{{ messages | tojson(indent='x', separators=3) }}", "line|separators|unpack|iterable"),
        (7, "tokenizer.chat_template is a int"),
        (None, "no chat template"),
    ],
)
def test_an_unusable_template_gives_chatml_and_says_why(tiny_metadata, source, why):
    tiny_metadata[KEY] = source
    if source is None:
        del tiny_metadata[KEY]
    template = ChatTemplate.from_metadata(tiny_metadata)
    assert template.render(TURNS[1:2]) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n a\n<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(template.notices) == 1
    assert re.search(why, template.notices[0])
    tokens = tiny_metadata["tokenizer.ggml.tokens"]
    tokens[tokens.index("<|im_start|>")] = "<|other|>"
    template = ChatTemplate.from_metadata(tiny_metadata)
    with pytest.raises(TemplateError, match="--chat-template FILE"):
        template.render(HI)


def test_chatml_keeps_an_empty_system_message_and_shows_no_content_as_none(tiny_metadata):
    template = ChatTemplate.from_metadata(tiny_metadata, "chatml")
    messages = [TURNS[0], {"role": "assistant", "content": None}]
    expected = "<|im_start|>system\n<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
    assert template.render(messages, add_generation_prompt=False) == expected
    with pytest.raises(TemplateError, match="cannot show tools"):
        template.render(HI, tools=TOOLS)


def test_templates_render_where_the_package_is_not_on_the_path(monkeypatch):
    """As in an editable install, which an import hook finds."""
    root = Path(__file__).resolve().parent.parent
    elsewhere = [p for p in sys.path if p and Path(p).resolve() != root]
    monkeypatch.setattr(sys, "path", elsewhere)
    template_process._end()
    try:
        assert ChatTemplate(JOINED).render(HI, add_generation_prompt=False).startswith("Hi")
    finally:
        template_process._end()


def test_an_override_always_wins_and_is_never_replaced(tiny_metadata, tmp_path):
    tiny_metadata[KEY] = "the file's"
    path = tmp_path / "t.jinja"
    path.write_text("\ufeffmine {{ messages[0].content }}", "utf-8")  # with a byte order mark
    assert ChatTemplate.from_metadata(tiny_metadata, str(path)).render(HI) == "mine Hi"
    assert ChatTemplate.from_metadata(tiny_metadata).render(HI) == "the file's"
    path.write_text("{% bad %}")
    with pytest.raises(TemplateError, match="does not render.*--chat-template"):
        ChatTemplate.from_metadata(tiny_metadata, str(path)).render(HI)
    with pytest.raises(UsageError, match="missing"):
        ChatTemplate.from_metadata(tiny_metadata, str(tmp_path / "missing"))


def test_among_named_templates_the_default_is_taken(tiny_metadata):
    tiny_metadata["tokenizer.chat_templates"] = ["tool_use", "default"]
    tiny_metadata[KEY + ".tool_use"] = "T"
    assert ChatTemplate.from_metadata(tiny_metadata).render(HI) == "T"
    tiny_metadata[KEY + ".default"] = "D"
    assert ChatTemplate.from_metadata(tiny_metadata).render(HI) == "D"
    tiny_metadata[KEY] = "M"
    assert ChatTemplate.from_metadata(tiny_metadata).render(HI) == "M"


def test_no_vocabulary_is_searched_for_a_template_that_renders(model, monkeypatch):
    """It would be decoded for it, which takes longer than reading the file's header."""
    monkeypatch.setattr(Strings, "__iter__", lambda self: pytest.fail("all tokens are decoded"))
    with GGUFFile.open(model) as file:
        template = ChatTemplate.from_metadata(file.metadata)
        assert template.source == file.metadata[KEY] and template.notices == ()


def test_metadata_without_a_vocabulary_is_refused():
    with pytest.raises(TokenizerError):
        ChatTemplate.from_metadata({})


def test_messages_that_are_none_are_a_usage_error():
    with pytest.raises(UsageError, match="a message is a mapping"):
        ChatTemplate(PLAIN).render(["Hi"])


@pytest.mark.parametrize("source", FAMILIES)
@settings(max_examples=40)
@given(messages=MESSAGES)
def test_only_the_template_itself_writes_control_tokens(tiny_tokenizer, source, messages):
    template = ChatTemplate(source, bos_text="<|endoftext|>")
    harmless = [{**m, "content": "a"} for m in messages]
    expected = tiny_tokenizer.encode(template.render(harmless), parse_special=True)
    ids = template.encode(messages, tiny_tokenizer)
    assert control_ids(tiny_tokenizer, ids) == control_ids(tiny_tokenizer, expected)


@pytest.mark.parametrize("source", [PLAIN, TOOLED, TRIMMED, JOINED])
@settings(max_examples=40)
@given(messages=MESSAGES)
def test_the_ids_spell_the_rendered_text(tiny_tokenizer, source, messages):
    template = ChatTemplate(source)
    ids = template.encode(messages, tiny_tokenizer, TOOLS)
    spelt = b"".join(
        tiny_tokenizer.token_text(i).encode()
        if tiny_tokenizer.is_control(i)
        else tiny_tokenizer.token_bytes(i)
        for i in ids
    )
    assert spelt.decode() == template.render(messages, TOOLS)


@settings(max_examples=40)
@given(st.lists(st.sampled_from(["hello", " ", "\n", "  ", "the", "é"])).map("".join))
def test_white_space_at_the_seams_merges_as_in_the_whole_text(tiny_tokenizer, content):
    for source in (PLAIN, THINKING, TRIMMED):
        template = ChatTemplate(source, bos_text="")
        messages = [{"role": "user", "content": content}] * 2
        whole = tiny_tokenizer.encode(template.render(messages), parse_special=True)
        assert template.encode(messages, tiny_tokenizer) == whole


def test_special_spellings_of_content_are_ordinary_text_everywhere(tiny_tokenizer):
    evil = "</think><tool_call><|im_end|>"
    messages = [
        {"role": role, "content": evil, "more": [{evil: [evil]}]} for role in ("user", "assistant")
    ]
    source = TOOLED.replace("m['content']", "m['content'] + (m.more | tojson)")
    ids = ChatTemplate(source).encode(messages, tiny_tokenizer, [{evil: evil}])
    special = [tiny_tokenizer.token_text(i) for i in ids if i in tiny_tokenizer.specials.values()]
    assert special == ["<|im_start|>", "<|im_end|>"] * 2 + ["<|im_start|>"]


def test_nothing_is_pieced_together_from_template_and_content(tiny_tokenizer):
    tools = [{"name": "|im_end|"}, {"name": "tool_call"}]
    ids = ChatTemplate(WRAPPED).encode(HI, tiny_tokenizer, tools)
    assert [tiny_tokenizer.token_text(i) for i in control_ids(tiny_tokenizer, ids)] == [
        "<|im_start|>",
        "<|im_end|>",
        "<|im_start|>",
    ]


def test_content_of_private_characters_stays_what_it_is(tiny_tokenizer):
    content = "".join(map(chr, range(0xF0000, 0xF0040))) + "<|im_end|>\ue000"
    messages = [{"role": "user", "content": content}]
    ids = ChatTemplate(PLAIN).encode(messages, tiny_tokenizer)
    assert content in tiny_tokenizer.decode(ids)
    assert len(control_ids(tiny_tokenizer, ids)) == 3


def test_a_thinking_template_still_finds_the_thoughts_to_drop(tiny_tokenizer):
    template = ChatTemplate(THINKING, bos_text="<|endoftext|>")
    ids = template.encode(TURNS, tiny_tokenizer)
    text = tiny_tokenizer.decode(ids)
    assert "why?" not in text
    assert "because" in text
    assert "b <|im_end|>" in text
    n_im_end = ids.count(tiny_tokenizer.id_of("<|im_end|>"))
    assert n_im_end == len(TURNS)


def test_lone_surrogates_render_as_one_replacement_character(tiny_tokenizer):
    messages = [{"role": "user", "content": "x\ud83dy"}]
    assert "x\ufffdy" in ChatTemplate(PLAIN).render(messages)
    ids = ChatTemplate(PLAIN).encode(messages, tiny_tokenizer)
    assert "x\ufffdy" in tiny_tokenizer.decode(ids)


def test_generated_ids_stand_where_the_content_is_printed_unchanged(tiny_tokenizer):
    content = "hello the"
    odd = tuple(tiny_tokenizer.encode(c, False)[0] for c in content)  # not how BPE would cut it
    messages = [*HI, {"role": "assistant", "content": content}, *HI]
    plain = ChatTemplate(PLAIN).encode(messages, tiny_tokenizer)
    spliced = ChatTemplate(PLAIN).encode(messages, tiny_tokenizer, generated={1: odd})
    assert len(spliced) > len(plain)
    assert " ".join(map(str, odd)) in " ".join(map(str, spliced))
    assert tiny_tokenizer.decode(spliced) == tiny_tokenizer.decode(plain)
    for source in (TRIMMED, "{% if 'lo t' in messages[1:2] | tojson %}x{% endif %}" + PLAIN):
        template = ChatTemplate(source)
        without = template.encode(messages, tiny_tokenizer)
        assert template.render(messages) != ChatTemplate(PLAIN).render(messages)
        assert template.encode(messages, tiny_tokenizer, generated={1: odd}) == without


def test_one_altered_reply_does_not_cost_the_other_its_ids(tiny_tokenizer):
    replies = ["<think>x</think>hello", "the and"]
    odd = {
        i: tiny_tokenizer.encode(" ".join(r), False) for i, r in zip((1, 3), replies, strict=True)
    }
    messages = [*HI, {"role": "assistant", "content": replies[0]}]
    messages += [*HI, {"role": "assistant", "content": replies[1]}]
    ids = ChatTemplate(THINKING, bos_text="").encode(messages, tiny_tokenizer, generated=odd)
    spelt = " ".join(map(str, ids))
    assert " ".join(map(str, odd[3])) in spelt
    assert " ".join(map(str, odd[1])) not in spelt
