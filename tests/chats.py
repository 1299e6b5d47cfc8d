"""Chat templates as tests use them: fixtures' bodies, and templates and messages in short."""

from kd.chat import ChatTemplate
from kd.tokenizer import Tokenizer


def tokenizer_of(nano):
    return Tokenizer.load(nano)


def chat_of(nano, tokenizer):
    return ChatTemplate.load(nano, tokenizer)


def user(content):
    return [{"role": "user", "content": content}]


def make(source, tokenizer, **limits):
    return ChatTemplate(source, tokenizer, place="here.jinja", **limits)
