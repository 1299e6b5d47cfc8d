"""A model folder's chat template: messages in, token ids out.

The template is a program from outside: it runs in jinja2's immutable sandbox, without files, clocks, imports or
mutation, under limits of size and time. What users write is data: it can never become a special token. For that every
string of a message is marked before the template sees it (an unused private-use character after each character that
could begin a special token, and before its first one); a special token is then recognised only where no mark stands in
it, the marks are taken out, and the text between two special tokens is encoded in one piece, so that the ids are those
of the model's own tokenizer whenever nobody typed a special token's name.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from kd.files import present, read_bounded, why
from kd.shapes import BadJson, Json
from kd.tokenizer import MAX_CONFIG_BYTES, Tokenizer, TokenizerError

MAX_TEMPLATE_CHARS = 1 << 20
MAX_OUTPUT_CHARS = 16 << 20
MAX_MESSAGES = 4096
TIME_LIMIT_S = 2.0
ROLES = ("system", "user", "assistant", "tool", "developer")

_NAME = re.compile(r"[A-Za-z0-9_$.-]{1,64}")
_FILTERS = """abs capitalize count d default dictsort e escape first float int items join last length list lower map max
    min reject rejectattr replace reverse safe select selectattr sort string title trim unique upper""".split()
_STR_METHODS = frozenset(
    """capitalize count endswith find index isalnum isalpha isdigit islower isspace isupper join
    lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines
    startswith strip title upper""".split()
)
_SCALARS = (str, int, float, bool, type(None), jinja2.Undefined)


class ChatError(ValueError):
    """Messages, or a template, that cannot be rendered. The message says which and why."""


class _Limit(jinja2.TemplateError):
    """The template went over a limit."""


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with limits: every loop turn, call, operator and output passes one of the checks below."""

    intercepted_binops = frozenset(["+", "*", "%", "**"])

    def __init__(self, *, time_limit_s: float, max_chars: int):
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
            finalize=self._finalize,
            cache_size=0,
        )
        self._local = threading.local()
        self._time_limit_s, self._max_chars = time_limit_s, max_chars
        filters = {name: self.filters[name] for name in _FILTERS}
        filters |= {"join": self._join, "replace": self._replace, "string": self._string, "tojson": self._tojson}
        self.filters = filters
        self.globals = {
            "range": self.globals["range"],
            "dict": dict,
            "namespace": self.globals["namespace"],
            "raise_exception": self._raise,
        }

    # ---- one rendering --------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._local.deadline = time.monotonic() + self._time_limit_s
        self._local.chars = 0

    @property
    def tick(self) -> None:
        """Compiled into the head of every loop's body (see `_parse`): a loop over plain data meets no other check."""
        self.check_time()

    def check_time(self) -> None:
        if time.monotonic() > getattr(self._local, "deadline", float("inf")):
            raise _Limit(f"ran for more than {self._time_limit_s} s")

    def spend(self, chars: int) -> None:
        """Count text that comes into being; the sum over a rendering is limited."""
        self._local.chars = getattr(self._local, "chars", 0) + chars
        if self._local.chars > 4 * self._max_chars:
            raise _Limit(f"made more than {self._max_chars} characters of text")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("tick")))
        for concat in list(tree.find_all(nodes.Concat)):  # a ~ b, which is no operator to the sandbox
            concat.nodes = [
                nodes.Call(nodes.EnvironmentAttribute("_string"), [part], [], None, None) for part in concat.nodes
            ]
        return tree

    # ---- what the sandbox asks ------------------------------------------------------------------------------------

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__} is not allowed")

    def wrap_str_format(self, value: Any) -> None:
        # Asked about every attribute: the sandbox's own str.format keeps attributes safe, but not widths.
        if getattr(value, "__name__", "") in ("format", "format_map") and isinstance(
            getattr(value, "__self__", None), str
        ):
            raise SecurityError(f"the string method {value.__name__} is not allowed")

    def getattr(self, obj: Any, attribute: str) -> Any:
        if attribute.startswith("_"):
            return self.unsafe_undefined(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, str) and argument.startswith("_") and not isinstance(obj, Mapping):
            return self.unsafe_undefined(obj, argument)
        return super().getitem(obj, argument)

    def is_safe_callable(self, obj: Any) -> bool:
        self.check_time()
        return super().is_safe_callable(obj)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __self.check_time()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            method = __obj.__name__
            if method not in _STR_METHODS:
                raise SecurityError(f"the string method {method} is not allowed")
            if method == "join":
                return __self._join(args[0], owner) if args else __obj()
            if method == "replace" and len(args) >= 2:
                return __self._replace(owner, *args)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.check_time()
        numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
        if operator == "%" and isinstance(left, str):
            raise SecurityError("formatting with % is not allowed; use ~")
        if operator == "**" or (numbers and operator == "*"):
            if not numbers or abs(left) > 1 << 63 or abs(right) > (64 if operator == "**" else 1 << 63):
                raise _Limit(f"uses {operator} on numbers this large, which is not allowed")
        elif operator == "*":
            size, times = (left, right) if hasattr(left, "__len__") else (right, left)
            self.spend(len(size) * max(0, int(times)) if hasattr(size, "__len__") else 0)
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            self.spend(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    # ---- output and filters ---------------------------------------------------------------------------------------

    def _finalize(self, value: Any) -> Any:
        if not isinstance(value, _SCALARS):
            # Lists printed with their brackets have broken prompts in the field.
            raise ChatError(f"the template prints a {type(value).__name__}; only text and numbers can be printed")
        if isinstance(value, str):
            self.spend(len(value))
        return value

    def _string(self, value: Any) -> str:
        value = self._finalize(value)
        return value if isinstance(value, str) else str(value)

    def _join(self, values: Iterable[Any], separator: str = "", attribute: str | None = None) -> str:
        parts = [self.getitem(v, attribute) if attribute is not None else v for v in values]
        parts = [self._string(part) for part in parts]
        self.spend(len(separator) * len(parts))
        return str(separator).join(parts)

    def _replace(self, text: str, old: str, new: str, count: int | None = None) -> str:
        text, old, new = str(text), str(old), str(new)
        self.spend(len(text) + text.count(old) * len(new))
        return text.replace(old, new, -1 if count is None else count)

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """As transformers' chat templates have it: no HTML escapes, no ASCII escapes."""
        self._count(value, 0)
        if ensure_ascii:  # would spell the marks out
            raise _Limit("uses tojson with ensure_ascii, which is not allowed")
        if indent is not None and not 0 <= indent <= 16:
            raise _Limit("uses tojson with an indent over 16, which is not allowed")
        return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)

    def _count(self, value: Any, depth: int) -> None:
        if depth > 64:
            raise _Limit("prints data nested deeper than 64, which is not allowed")
        self.check_time()
        self.spend(len(value) if isinstance(value, str) else 1)
        if isinstance(value, Mapping):
            for key, inner in value.items():
                self._count(key, depth + 1)
                self._count(inner, depth + 1)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                self._count(inner, depth + 1)

    @staticmethod
    def _raise(message: str) -> None:
        raise ChatError(f"the template refuses these messages: {message}")


class ChatTemplate:
    """One model folder's template; safe to use from several threads."""

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        *,
        place: str = "chat template",
        time_limit_s: float = TIME_LIMIT_S,
        max_chars: int = MAX_OUTPUT_CHARS,
    ):
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ChatError(f"{place}: is longer than {MAX_TEMPLATE_CHARS} characters; this is no chat template")
        self.source, self.place, self._tokenizer = source, place, tokenizer
        self._max_chars = max_chars
        self._environment = _Environment(time_limit_s=time_limit_s, max_chars=max_chars)
        self._heads = "".join(sorted({name[0] for name in tokenizer.special}))
        names = sorted(tokenizer.special, key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None
        self.takes_tools = re.search(r"\btools(_ts_str)?\b", source) is not None
        self._template = self._guard(lambda: self._environment.from_string(source))

    @classmethod
    def load(cls, folder: str | Path, tokenizer: Tokenizer, *, follow_links: bool = False) -> ChatTemplate | None:
        """From `chat_template.jinja`, or `chat_template` in `tokenizer_config.json`; None if the folder has neither.
        Raises ChatError."""
        folder = Path(folder)
        path = folder / "chat_template.jinja"
        try:
            if present(path):
                source = read_bounded(
                    path, 4 * MAX_TEMPLATE_CHARS, follow_links
                ).decode()  # the constructor counts characters
                return cls(source, tokenizer, place=str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise ChatError(f"{path}: cannot be read ({why(error)})") from None
        path = folder / "tokenizer_config.json"
        try:
            if not present(path):
                return None
            found = Json.parse(read_bounded(path, MAX_CONFIG_BYTES, follow_links)).get("chat_template")
            return cls(found.text(), tokenizer, place=str(path)) if found else None
        except OSError as error:
            raise ChatError(f"{path}: cannot be read ({why(error)})") from None
        except BadJson as error:
            raise ChatError(f"{path}: {error}; put the template into chat_template.jinja") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        thinking: bool | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of the conversation. messages: {"role", "content": text, list of text parts or None, ...}.
        thinking None: the template's own default. Raises ChatError."""
        text, mark = self._render(messages, thinking, add_generation_prompt, tools)
        ids: list[int] = []
        for i, piece in enumerate(self._special.split(text) if self._special else [text]):
            if i % 2:
                ids.append(self._tokenizer.special[piece])
            else:
                ids += self._tokenizer.encode(piece.replace(mark, ""))
        return ids

    def render_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        thinking: bool | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The same as text, to look at; special tokens and what users typed cannot be told apart in it."""
        text, mark = self._render(messages, thinking, add_generation_prompt, tools)
        return text.replace(mark, "")

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _render(self, messages: Any, thinking: bool | None, add_generation_prompt: bool, tools: Any) -> tuple[str, str]:
        clean = _check_messages(messages)
        if tools and not self.takes_tools:
            raise ChatError(f"{self.place}: this model's template knows no tools; leave `tools` out")
        mark = _unused_character([self.source, clean, tools])
        protect = _Protect(mark, self._heads)
        values: dict[str, Any] = {
            "messages": [protect.message(m) for m in clean],
            "add_generation_prompt": add_generation_prompt,
        }
        if thinking is not None:
            values["thinking"] = thinking
        if tools:
            values["tools"] = protect.value(list(tools))

        def run() -> str:
            self._environment.start()
            parts, length = [], 0
            for part in self._template.generate(values):
                parts.append(part)
                length += len(part)
                if length > self._max_chars:
                    raise _Limit(f"made more than {self._max_chars} characters of text")
            return "".join(parts)

        return self._guard(run), mark

    def _guard(self, body: Callable[[], Any]) -> Any:
        try:
            return body()
        except ChatError:
            raise
        except SecurityError as error:
            raise ChatError(f"{self.place}: the template is not safe: {error.message}") from None
        except _Limit as error:
            raise ChatError(f"{self.place}: the template {error.message}") from None
        except jinja2.TemplateSyntaxError as error:
            raise ChatError(f"{self.place}:{error.lineno}: {error.message}") from None
        except jinja2.TemplateError as error:
            raise ChatError(f"{self.place}: {error.message}") from None
        except RecursionError:
            raise ChatError(f"{self.place}: the template calls itself without end") from None
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, MemoryError) as error:
            if isinstance(error, TokenizerError):
                raise
            raise ChatError(
                f"{self.place}: the template failed on these messages ({type(error).__name__}: {error})"
            ) from None


class _Protect:
    """Marks every string from outside, so that it can neither be nor complete a special token."""

    def __init__(self, mark: str, heads: str):
        self._mark = mark
        self._head = re.compile("([" + re.escape(heads) + "])") if heads else None

    def text(self, text: str) -> str:
        lead = len(text) - len(text.lstrip())  # before the first visible character: `trim` must still find the spaces
        if lead == len(text):
            return text
        body = text[lead:]
        if self._head:
            body = self._head.sub(rf"\1{self._mark}", body)
        return text[:lead] + self._mark + body

    def value(self, value: Any, depth: int = 0) -> Any:
        if depth > 64:
            raise ChatError("a message is nested deeper than 64")
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            # Names such as "function" stay as the template expects them: no special token fits into their alphabet.
            return {
                key if _NAME.fullmatch(str(key)) else self.text(str(key)): inner
                if key == "type" and isinstance(inner, str) and _NAME.fullmatch(inner)
                else self.value(inner, depth + 1)
                for key, inner in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.value(inner, depth + 1) for inner in value]
        if value is None or isinstance(value, (bool, int, float)):
            return value
        raise ChatError(f"a message holds a {type(value).__name__}; only text, numbers, lists and maps are allowed")

    def message(self, message: dict[str, Any]) -> dict[str, Any]:
        return self.value({k: v for k, v in message.items() if k != "role"}) | {"role": message["role"]}


def _check_messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise ChatError("messages must be a list of at least one message")
    if len(messages) > MAX_MESSAGES:
        raise ChatError(f"{len(messages)} messages; at most {MAX_MESSAGES} are allowed")
    clean = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ChatError(f'messages[{i}] is no map with "role" and "content"')
        role = message.get("role")
        if role not in ROLES:
            raise ChatError(f"messages[{i}].role is {role!r:.60}; it must be one of {', '.join(ROLES)}")
        clean.append(dict(message) | {"role": role, "content": _content(message.get("content"), i)})
    return clean


def _content(content: Any, i: int) -> str:
    """Content as text: parts joined, and nothing for nothing, whatever a template would make of a list or None."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise ChatError(f"messages[{i}].content is a {type(content).__name__}; it must be text or a list of text parts")
    texts = []
    for j, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if kind != "text":
            raise ChatError(f"messages[{i}].content[{j}] is no text part; this engine serves text only")
        if not isinstance(part.get("text"), str):
            raise ChatError(f"messages[{i}].content[{j}].text is missing or no text")
        texts.append(part["text"])
    return "".join(texts)


def _unused_character(value: Any) -> str:
    used: set[str] = set()
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            if not item.isascii():
                used.update(item)
        elif isinstance(item, Mapping):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
    for code in range(0x10FFFD, 0x100000, -1):  # the last private-use plane
        if chr(code) not in used:
            return chr(code)
    raise ChatError("the messages use every private-use character; this is no text")
