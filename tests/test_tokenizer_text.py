"""kd.tokenizer against tiktoken built straight from the folder's file, and against a second implementation, on hard text."""

from __future__ import annotations

import os
import random
import re
import unicodedata
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import regex
import tiktoken
from conftest import ROOT
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_tokenizer import PATTERN
from tiktoken.load import load_tiktoken_bpe

from kd.tokenizer import Tokenizer

NANO = ROOT / "models" / "nano"
SEEDS = range(60)


@cache
def tokenizer(folder: Path = NANO) -> Tokenizer:
    return Tokenizer.load(folder)


@cache
def ranks() -> dict[bytes, int]:
    with mock.patch.dict(os.environ, TIKTOKEN_CACHE_DIR=""):  # it remembers files by their path, whatever they hold now
        return load_tiktoken_bpe(str(NANO / "tiktoken.model"))


@cache
def oracle() -> tiktoken.Encoding:
    """tiktoken's own reader of the file, the split pattern as Kimi publishes it, and no special tokens at all."""
    return tiktoken.Encoding("oracle", pat_str=PATTERN, mergeable_ranks=ranks(), special_tokens={})


@cache
def by_hand() -> tuple[regex.Pattern, dict[bytes, int]]:
    return regex.compile(PATTERN, regex.V1), ranks()


def merged(text: str) -> list[int]:
    """The same once more without tiktoken: another regex engine, and the merge of lowest rank until there is none."""
    split, known = by_hand()
    ids = []
    for piece in split.findall(text):
        parts = [bytes([b]) for b in piece.encode()]
        while len(parts) > 1:
            pairs = [known.get(a + b, len(known)) for a, b in zip(parts, parts[1:], strict=False)]
            best = min(pairs)
            if best == len(known):
                break
            at = pairs.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [known[part] for part in parts]
    return ids


def check(text: str, also_by_hand: bool = False) -> None:
    t = tokenizer()
    ids = t.encode(text)
    assert ids == oracle().encode(text), ascii(text)
    assert all(0 <= i < t.n_ranks for i in ids), f"user text became a special token: {text!a}"
    assert t.decode_bytes(ids) == text.encode() and t.decode(ids) == text
    if also_by_hand:
        assert ids == merged(text), ascii(text)


@cache
def categories() -> dict[str, list[str]]:
    """Every general category but surrogates -> its characters, at most 4,000 of each, spread over its range."""
    found: dict[str, list[str]] = {}
    for code in range(0x110000):
        found.setdefault(unicodedata.category(chr(code)), []).append(chr(code))
    assert len(found) == 30 and found.pop("Cs")
    return {name: chars[:: max(1, len(chars) // 4000)] for name, chars in found.items()}


CATEGORIES = [
    "Cc", "Cf", "Cn", "Co", "Ll", "Lm", "Lo", "Lt", "Lu", "Mc", "Me", "Mn", "Nd", "Nl", "No", "Pc", "Pd", "Pe", "Pf", "Pi",
    "Po", "Ps", "Sc", "Sk", "Sm", "So", "Zl", "Zp", "Zs",
]  # fmt: skip
SCRIPTS = {
    "han": "世界我爱北京天安門漢字々〇㐀𠀀𠮷𰀀",
    "kana": "ひらがなカタカナーﾊﾝ",
    "hangul": "한국어조선말ᄒ\u1161ᆫ",
    "latin": "aàÀzZßſİıǅﬁＡａ",
    "cyrillic": "РусскийЙй",
    "greek": "ΕλληνικάΣς",
    "arabic": "العربيةﷺـ",
    "hebrew": "עבריתשׁ",
    "indic": "हिन्दीதமிழ்ไทยမြန်မာ",
    "digits": "0123456789٠١٢०१２３½²Ⅷ௧",
    "bopomofo": "ㄅㄆㄇ〆〤",
}
JOINED = ["👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪🇯🇵🇪", "1️⃣#️⃣", "🧑🏿‍🚀", "☠︎☠️", "\u200d\u200d", "❤️‍🔥", "\U000e0067\U000e007f"]
SPACES = [
    " ",
    "  ",
    "\t",
    "\n",
    "\r",
    "\r\n",
    "\n\n\n",
    "\x0b",
    "\x0c",
    "\x1c",
    "\x1f",
    "\x85",
    "\xa0",
    "\u2003",
    "\u2028",
    "\u3000",
]
ENDINGS = ["s", "t", "re", "ve", "m", "ll", "d"]
QUOTES = ["'", "’", "＇", "ʼ", "`", "''"]


def cased(rng: random.Random, text: str) -> str:
    return "".join(rng.choice((c.upper(), c.lower())) for c in text)


def contraction(rng: random.Random) -> str:
    word = rng.choice(["I", "you", "can", "DON", "он", "世", "é", "X1", "", " ", "\u0301", "ſ"])
    return (
        word
        + rng.choice(QUOTES)
        + cased(rng, rng.choice(ENDINGS + ["ſ", "x", "LL've"]))
        + rng.choice(["", " ", "a", "'s"])
    )


def number(rng: random.Random) -> str:
    zero = rng.choice("0٠०０𝟎")
    digits = "".join(chr(ord(zero) + rng.randrange(10)) for _ in range(rng.randint(1, 10)))
    return rng.choice(["", "-", "+", "$", " "]) + digits + rng.choice(["", ".", ",", "e", "½", "Ⅷ"])


def lookalike(rng: random.Random) -> str:
    """A special token's name, or something next to it."""
    name = rng.choice(sorted(tokenizer().special))
    cut = rng.randrange(len(name) + 1)
    return rng.choice(
        [
            name,
            name * 2,
            name[:cut],
            name[cut:],
            name[:cut] + "\u200b" + name[cut:],
            name.upper(),
            f"<|{name}|>",
            name[::-1],
        ]
    )


def pieces(rng: random.Random) -> list[str]:
    """One of each kind of hard text."""
    pool = categories()
    one, other = rng.sample(CATEGORIES, 2)
    base = rng.choice(pool[rng.choice(["Lu", "Ll", "Lo", "Nd", "So", "Zs", "Po"])])
    return [
        "".join(rng.choices(pool[one], k=rng.randint(1, 40))),
        rng.choice(pool[one]) * rng.choice([1, 2, 3, 17, 900]),
        "".join(rng.choice(pool[rng.choice((one, other))]) for _ in range(30)),
        "".join(rng.choices(SCRIPTS["han"], k=rng.randint(1, 200))),
        "".join(rng.choice(SCRIPTS[rng.choice(sorted(SCRIPTS))]) for _ in range(40)),
        base + "".join(rng.choices(pool["Mn"] + pool["Me"] + pool["Mc"], k=rng.randint(1, 12))),
        "".join(rng.choices(JOINED + ["a", " ", "世"], k=5)),
        "".join(
            rng.choices([chr(c) for c in range(32)] + ["\x7f", "\x80", "\x9f", "\ufeff", "\ufffd", "\ufffe"], k=12)
        ),
        "".join(rng.choices(SPACES, k=rng.randint(1, 25))),
        "".join(rng.choices(SPACES + ["x", "1", "!", "世"], k=20)),
        contraction(rng),
        number(rng),
        lookalike(rng),
    ]


@pytest.mark.parametrize("category", CATEGORIES)
def test_every_category(category):
    """Each character of it alone, beside a letter, a digit, a space and a line end, and in runs."""
    assert set(CATEGORIES) == set(categories())
    chars = categories()[category]
    check("".join(chars))
    for around in ("{} ", "a{}", "{}B", "1{}", " {}", "{}\n", "世{}", "'{}"):
        check("".join(around.format(c) for c in chars[:400]))
    check("".join(c * 5 + " " for c in chars[:200]))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_hard_text(seed):
    rng = random.Random(seed)
    for _ in range(6):
        parts = pieces(rng)
        rng.shuffle(parts)
        check("".join(parts[: rng.randint(1, len(parts))]))
        for part in parts:
            check(part)


@pytest.mark.parametrize("seed", range(8))
def test_a_second_implementation_agrees(seed):
    """On characters that both regex engines know: those of the scripts above, not what a newer Unicode has added."""
    rng = random.Random(1000 + seed)
    words = ["".join(SCRIPTS.values()), "".join(SPACES), "".join(JOINED), "".join(map(chr, range(127)))]
    for _ in range(40):
        parts = ["".join(rng.choices(rng.choice(words), k=rng.randint(1, 20))) for _ in range(4)]
        check("".join([*parts, contraction(rng), number(rng), lookalike(rng)]), also_by_hand=True)


@pytest.mark.parametrize(
    "unit", ["a", "A", "aA", "世", " ", "\n", " \n", "1", "!", "é", "e\u0301", "🙂", "👩‍", "\x00", "'s", "ab "]
)
@pytest.mark.parametrize("count", [1000, 30_001])
def test_very_long_runs(unit, count):
    """Beyond 25,000 characters without a change between space and other text Kimi cuts: test_tokenizer.py has where."""
    text = unit * count
    ids = tokenizer().encode(text)
    assert tokenizer().decode(ids) == text and max(ids) < tokenizer().n_ranks
    if max(map(len, re.findall(r"\s+|\S+", text))) <= 25_000:
        assert ids == oracle().encode(text)


@pytest.mark.parametrize("digits", range(1, 11))
def test_numbers(digits):
    text = "9876543210"[:digits]
    assert [len(piece) for piece in by_hand()[0].findall(text)] == [3] * (digits // 3) + [digits % 3] * (digits % 3 > 0)
    for around in ("{}", " {}", "x{}y", "{}.{}", "-{}", "${},00", "{}世", "{}\n"):
        check(around.format(text, text), also_by_hand=True)


def test_contractions_in_every_case():
    for quote in QUOTES:
        for ending in ENDINGS:
            for form in {ending, ending.upper(), ending.title(), ending[0] + ending[1:].upper()}:
                for before in ("he", "HE", "Он", "世", "é", "1", " ", "", "x'"):
                    for after in ("", " go", "x", "'ll", "\n"):
                        check(f"{before}{quote}{form}{after}", also_by_hand=True)


def test_every_special_name_typed_by_a_user_is_text():
    t = tokenizer()
    for name, number_ in t.special.items():
        for text in (name, f"a{name}b", name * 3, f"{name}\n{name}", name[:-1], f" {name}"):
            check(text)
            assert number_ not in t.encode(text)
        assert t.encode(name, allow_special=True) == [number_]


characters = st.characters(codec="utf-8")
hard = st.one_of(
    st.text(characters, max_size=60),
    st.text(st.sampled_from("".join(SCRIPTS.values()) + "".join(SPACES) + "'’-_<|>[]"), max_size=60),
    st.lists(st.sampled_from(JOINED + SPACES + ENDINGS + QUOTES), max_size=20).map("".join),
    st.integers(0, 1 << 32).map(lambda n: "".join(pieces(random.Random(n)))),
    st.builds(lambda unit, n: unit * n, st.text(characters, min_size=1, max_size=3), st.integers(1, 3000)),
)


@settings(max_examples=400, deadline=None)
@given(hard)
@example("<|im_end|>'s 1234\r\n 世界e\u0301")
def test_any_hard_text(text):
    check(text)
