"""Filling in contents gives what rendering gives, for every template that is taken for one that never looks."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollouts_core.data.rendering import ChatFormat, _rendered_anew, chat_format, render_conversation
from rollouts_core.data.skeletons import never_looks
from rollouts_core.errors import BadInput
from rollouts_core.types import Message
from tests.rollouts_core.data.test_templates import templates, tokenizer_with

CONTENTS = st.text("ab {}%<|>\n\u2003/_é", max_size=12) | st.sampled_from(["", " x ", "<think>a</think>b", "/no_think"])
ROLES = st.sampled_from([("user", "assistant"), ("user", "assistant") * 2, ("system", "user", "assistant")])


@pytest.fixture(scope="module")
def chats() -> dict[str, ChatFormat]:
    return {name: chat_format(tokenizer_with(text)) for name, text in templates().items() if never_looks(text)}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(roles=ROLES, data=st.data())
def test_filled_in_is_as_rendered(chats: dict[str, ChatFormat], roles: tuple[str, ...], data: st.DataObject) -> None:
    messages = [Message(role, data.draw(CONTENTS)) for role in roles]
    given = data.draw(st.integers(0, len(roles) - 1))
    for name, chat in chats.items():
        try:
            expected = _rendered_anew(chat, messages, (), ("assistant",), given)
        except BadInput:
            continue
        assert render_conversation(chat, messages, given=given) == expected, name
    assert len([chat for chat in chats.values() if any(chat.known.values())]) >= 3


@pytest.mark.parametrize(
    ("template", "never"),
    [
        ("{% for m in messages %}{{ m.role + m['content'] | trim }}{% endfor %}", True),
        ("{% for m in messages %}{% if m.content %}{{ m.content }}{% endif %}{% endfor %}", True),
        ("{% set rest = messages[1:] %}{% for m in rest %}{{ m.content }}{% endfor %}", True),
        ("{% if messages|length > 2 and messages[0].role == 'user' %}x{% endif %}", True),
        ("{% for m in messages %}{% if 'x' in m.content %}y{% endif %}{% endfor %}", False),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", False),
        ("{% for m in messages %}{{ m.content.strip('x') }}{% endfor %}", False),
        ("{% for m in messages %}{% set c = 'x' + m.content | trim %}{{ c + 'y' }}{% endfor %}", True),
        ("{% for m in messages %}{% if messages[loop.index0 + 1].role == 'user' %}x{% endif %}{% endfor %}", True),
        ("{% for m in messages %}{% set c = m.content %}{% if c == 'x' %}y{% endif %}{% endfor %}", False),
        ("{% for m in messages %}{% set c = m.content %}{% if c %}y{% endif %}{% endfor %}", False),
        ("{% for m in messages %}{% set c = m.content %}{{ c | upper }}{% endfor %}", False),
        ("{% for m in messages %}{{ (m.role + m.content) | trim }}{% endfor %}", False),
        ("{{ messages | tojson }}", False),
        ("{% for m in messages %}{{ m }}{% endfor %}", False),
        ("{% for m in messages %}{{ m.get('content') }}{% endfor %}", False),
        ("{% for m in messages %}{% for k, v in m.items() %}{{ v }}{% endfor %}{% endfor %}", False),
        ("{% for m in messages %}{{ m[key] }}{% endfor %}", False),
        ("{% for m in messages %}{% if m == messages[0] %}x{% endif %}{% endfor %}", False),
        ("{% for m in messages %}{% if loop.previtem.content == 'x' %}y{% endif %}{% endfor %}", False),
        ("{% for m in messages %}{% if m.content | length > 3 %}y{% endif %}{% endfor %}", False),
        ("{% macro f(m) %}{{ m.content }}{% endmacro %}{% for m in messages %}{{ f(m) }}{% endfor %}", False),
        ("{% set ns = namespace(m=messages[0]) %}{{ ns.m.content }}", False),
        ("{% for w in messages[0].content %}{{ w }}{% endfor %}", False),
        ("{% for m in messages if m.content != 'x' %}{{ m.role }}{% endfor %}", False),
    ],
)
def test_what_looks_at_contents(template: str, never: bool) -> None:
    assert never_looks(template) is never
