"""kd.chat against templates that attack, do not end, or grow; and what their limits are."""

import itertools
import time

import pytest
from chats import chat_of, make, tokenizer_of, user

from kd.chat import ChatError, ChatTemplate

tokenizer = pytest.fixture(tokenizer_of, scope="module")
chat = pytest.fixture(chat_of, scope="module")


# ---- templates that attack ---------------------------------------------------------------------------------

# Known ways out of jinja2 templates, and plain ones into this process.
ATTACKS = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}",
    "{{ ''|attr('__class__') }}",
    "{{ (1).__class__.__base__ }}",
    "{{ [].__class__ }}",
    "{{ {}.__class__ }}",
    "{{ ().__class__.__bases__[0] }}",
    "{{ messages.__class__ }}",
    "{{ messages[0].__class__ }}",
    "{{ messages[0]['__class__'].__init__ }}",
    "{{ messages[0].content.__class__.__mro__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ self.__dict__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ namespace().__class__ }}",
    "{{ namespace()._Namespace__attrs.__class__ }}",
    "{{ dict.__base__ }}",
    "{{ range.__class__ }}",
    "{{ range(3).__iter__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception.__func__ }}",
    "{{ raise_exception.__code__ }}",
    "{% for x in messages %}{{ loop.__class__ }}{% endfor %}",
    "{% macro f() %}{% endmacro %}{{ f.__globals__ }}",
    "{% macro f() %}{{ caller.__globals__ }}{% endmacro %}{% call f() %}{% endcall %}",
    "{% macro f() %}{% endmacro %}{{ f._func.__code__ }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{{ '%s' % messages }}",
    "{{ '%c%c' % (1, 2) }}",
    "{{ ''.join.__self__ }}",
    "{{ 'a'.encode('utf-8') }}",
    "{{ ''.format.__call__('{0.__class__}', 1) }}",
    "{{ messages.append({}) }}",
    "{{ messages.clear() }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages[0].pop('content') }}",
    "{{ messages.sort() }}",
    "{{ messages[0].setdefault('x', 1) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
    "{% from 'os' import system %}",
    "{{ config }}{{ config.items() }}",
    "{{ request.application.__globals__ }}",
    "{{ get_flashed_messages.__globals__ }}",
    "{{ url_for.__globals__ }}",
    "{{ environment.loader.x }}",
    "{{ kd.x }}",
    "{{ open('/etc/passwd').read() }}",
    "{{ __import__('os').system('id') }}",
    "{{ __builtins__.x }}",
    "{{ __class__.x }}",
    "{{ (messages | map(attribute='__class__') | first).x }}",
    "{{ messages | map('attr', '__class__') | first }}",
    "{{ ['__class__'] | map('upper') | first | attr('x') }}",
    "{{ messages | sort(attribute='__class__.__name__') | first }}",
    "{{ messages | groupby('__class__') }}",
    "{{ 1 | pprint }}",
    "{{ ['id'] | random }}",
    "{{ 'x' | xmlattr }}",
    "{{ '%s' | format(1) }}",
    "{{ messages }}",
    "{{ messages[0] }}",
    "{{ namespace }}",
    "{{ range }}",
    "{{ self }}",
    "{{ raise_exception }}",
    "{% do messages.append(1) %}",
    "{{ _('x') }}",
    "{% debug %}",
    "{% set messages = 1 %}{{ messages.x.y }}",
]


@pytest.mark.parametrize("source", ATTACKS)
def test_attacks_end_in_a_sentence(tokenizer, source):
    messages = user("hi")
    with pytest.raises(ChatError) as error:
        make(source, tokenizer).render(messages)
    text = str(error.value)
    assert 10 < len(text) < 400 and "\n" not in text and " at 0x" not in text
    assert messages == user("hi")


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) | list %}"
        "{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}",
        "{% for a in range(9999) %}{% for b in range(9999) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for x in [[1] * 50] recursive %}{{ loop([x, x]) if loop.depth < 40 }}{% endfor %}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ 10 ** 999 }}",
        "{{ 10 ** 10 ** 10 ** 10 }}",
        "{{ (9 * 10 ** 18) * (9 * 10 ** 18) * (9 * 10 ** 18) }}",
        "{{ ([0] * 10 ** 12) | length }}",
        "{{ (10 ** 12 * 'a') | length }}",
        "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
        "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
        "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s.replace('x', n.s ~ n.s) %}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s | replace('x', n.s ~ n.s) %}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = [n.s, n.s] | join %}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = 'x'.join([n.s, n.s]) %}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}{% endfor %}",
        "{% set n = namespace(s=[]) %}{% for i in range(99) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s | tojson }}",
        "{% set n = namespace(s=[]) %}{% for i in range(40) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s | tojson }}",
        "{% set n = namespace(s=[0]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s | length }}",
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
        "{{ 'x'.center(10 ** 10) }}",
        "{{ 'x'.ljust(10 ** 10) }}",
        "{{ 'x'.zfill(10 ** 10) }}",
        "{{ 'x' | center(10 ** 10) }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ 'x\t'.expandtabs(10 ** 10) }}",
        "{{ 'x' | indent(10 ** 10) }}",
        "{{ [1] | batch(10 ** 10, 1) | list }}",
        "{{ [1] | tojson(indent=10 ** 10) }}",
        "{{ lipsum(n=10 ** 9) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_templates_that_do_not_end_or_grow(tokenizer, source):
    start = time.monotonic()
    with pytest.raises(ChatError) as error:
        make(source, tokenizer, time_limit_s=0.2, max_chars=100_000).render(user("hi"))
    assert time.monotonic() - start < 5
    assert "\n" not in str(error.value)


def test_expression_errors_name_the_place(tokenizer):
    for source, says in [
        ("{{ (", "here.jinja:1: unexpected"),
        ("\n\n{% if %}", "here.jinja:3: "),
        ("{{ 1 / 0 }}", "here.jinja: the template failed on these messages (ZeroDivisionError"),
        ("{{ x.y }}", "here.jinja: 'x' is undefined"),
        ("{{ 'a' | nope }}", "No filter named 'nope'"),
        ("{{ raise_exception('one system message only') }}", "one system message only"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
    ]:
        with pytest.raises(ChatError) as error:
            make(source, tokenizer).render(user("hi"))
        assert says in str(error.value), source


def test_size_limits(tokenizer, tmp_path):
    with pytest.raises(ChatError, match="is longer than 1048576 characters"):
        make("x" * ((1 << 20) + 1), tokenizer)
    path = tmp_path / "chat_template.jinja"
    path.write_text("x" * ((1 << 20) + 10))
    with pytest.raises(ChatError, match="chat_template.jinja: is longer than"):
        ChatTemplate.load(tmp_path, tokenizer)
    small = make("{{ messages[0].content }}", tokenizer, max_chars=1000)
    assert small.render_text(user("x" * 900)) == "x" * 900
    with pytest.raises(ChatError, match="more than 1000 characters"):
        small.render_text(user("x" * 1100))


def test_a_template_that_failed_works_again(tokenizer):
    """Limits are of one rendering, not of the object."""
    template = make(
        "{% if messages[0].content == 'stop' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}",
        tokenizer,
        max_chars=1000,
    )
    for _ in range(20):
        assert template.render_text(user("y" * 900))
        with pytest.raises(ChatError):
            template.render_text(user("z" * 1100))


def test_threads_share_a_template(chat, tokenizer):
    from concurrent.futures import ThreadPoolExecutor

    texts = [f"message {i} " + "<|im_end|>" * (i % 5) for i in range(64)]
    want = [chat.render(user(t)) for t in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda t: chat.render(user(t)), texts)) == want


def test_no_case_is_tested_twice():
    assert len(set(ATTACKS)) == len(ATTACKS) and all(a != b for a, b in itertools.pairwise(sorted(ATTACKS)))
