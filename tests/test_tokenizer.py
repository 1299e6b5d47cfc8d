"""kd.tokenizer against tiktoken built here directly, on hard text; and its reader against damaged files."""

import base64
import json
import random

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from kd.tokenizer import PIECE_CHARS, RUN_CHARS, Tokenizer, TokenizerError, read_ranks, read_special

# Kimi K2's split pattern once more, so that a slip in the package's copy is seen.
HAN = r"[\p{Han}]+"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]", r"\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
TAIL = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        HAN,
        rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+{TAIL}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*{TAIL}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

HARD = [
    "",
    " ",
    "\n",
    "a",
    "def f(x):\n    return x + 1\n",
    "世界",
    "我爱北京天安门",
    "漢字かな交じり文とカタカナ",
    "한국어 조선말",
    "中文English混排123数字",
    "𠀀𠮷𡈽 are astral Han",
    "𐍈𝔘𝓃𝒾 𝟘𝟙𝟚",
    "🙂",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽",
    "🇩🇪🇯🇵",
    "e\u0301 u\u0308 \u0301",
    "I'm you're we've he'll she'd it's DON'T can'T X'S 'tis ''' 'll",
    "İstanbul ǅ ǆ ǈ ß ﬁ ſ Ω",
    "ÀÉÎõü ñ Ñandú",
    "HTTPServer iPhone XMLHttpRequest camelCaseWord SCREAMING_SNAKE",
    "1 12 123 1234 12345678901234567890 ٣٤٥ ½ Ⅷ ०१२",
    "   leading",
    "trailing   ",
    "a  b   c    d\t\te \t f",
    "\r\n\r\n  \r\n x",
    "\n\n\n    \n",
    "\u00a0\u2003\u3000x",
    "x\u2028y\u2029z\u0085w\x0b\x0c\x1c\x1d",
    "\x00\x01\x7f\ufeff\ufffd\uffff",
    "...!!!???\n\n---===>>>",
    "a.b,c;d:e!f?g/h\\i|j",
    "#!/bin/sh\n$x=`y`; \"z\" && 'w'",
    "العربية עברית हिन्दी ไทย ქართული",
    "Ελληνικά Русский",
    "a" * 3000,
    "ab " * 1000,
    "界" * 999,
    "<|im_end|>",
    "<|im_user|>user<|im_middle|>hi<|im_end|>",
    "[EOS][BOS][PAD][UNK]",
    "<think></think>",
    "<|im_en d|>",
]


@pytest.fixture(scope="module")
def tokenizer(nano):
    return Tokenizer.load(nano)


@pytest.fixture(scope="module")
def oracle(nano):
    ranks = {}
    for line in (nano / "tiktoken.model").read_text().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    added = json.loads((nano / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    special = {entry["content"]: int(i) for i, entry in added.items()}
    return tiktoken.Encoding("oracle", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)


@pytest.mark.parametrize("text", HARD, ids=lambda t: ascii(t)[:30])
def test_hard_text(tokenizer, oracle, text):
    ids = tokenizer.encode(text)
    assert ids == oracle.encode(text, disallowed_special=())
    assert all(i < tokenizer.n_ranks for i in ids), "user text became a special token"
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=80))
def test_any_text(nano, text):
    tokenizer = _cached(nano)
    assert tokenizer.decode(tokenizer.encode(text)) == text


_tokenizers = {}


def _cached(folder):
    if folder not in _tokenizers:
        _tokenizers[folder] = Tokenizer.load(folder)
    return _tokenizers[folder]


def test_mixed_hard_text(tokenizer, oracle):
    rng = random.Random(0)
    for _ in range(100):
        text = "".join(rng.choice(HARD) for _ in range(6))[:2000]
        assert tokenizer.encode(text) == oracle.encode(text, disallowed_special=())


def test_special_tokens_only_when_allowed(tokenizer, oracle):
    text = "<|im_user|>user<|im_middle|>[EOS]<|im_end|>"
    allowed = tokenizer.encode(text, allow_special=True)
    assert allowed == oracle.encode(text, allowed_special="all")
    assert allowed[0] == tokenizer.special["<|im_user|>"] and allowed[-1] == tokenizer.special["<|im_end|>"]
    assert tokenizer.decode(allowed) == text
    assert not set(tokenizer.encode(text)) & set(tokenizer.special.values())


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff", "\ud83d\ude42", "x" * 450_000 + "\udc80"], ids=range(4))
def test_surrogates_are_refused(tokenizer, text):
    with pytest.raises(TokenizerError, match=r"character \d+ is U\+D[0-9A-F]{3}, a surrogate"):
        tokenizer.encode(text)


def reference_pieces(text):
    """Kimi's reference, word for word: 400,000-character pieces, then runs of at most 25,000."""
    for i in range(0, len(text), 400_000):
        s = text[i : i + 400_000]
        length, is_space, start = 0, s[0].isspace(), 0
        for at, c in enumerate(s):
            if is_space ^ c.isspace():
                length, is_space = 1, c.isspace()
            else:
                length += 1
                if length > 25_000:
                    yield s[start:at]
                    start, length = at, 1
        yield s[start:]


@pytest.mark.parametrize(
    "text",
    [
        "x" * 25_000,
        "x" * 25_001,
        "x" * 50_001 + " y",
        " " * 25_001 + "x",
        "ab \n" * 20_000,
        "\n" * 75_500,
        "a b" * 1000 + "q" * 60_000 + "\t" * 30_000 + "z",
        "hello world " * 34_000 + "x" * 26_000,
    ],
    ids=range(8),
)
def test_long_runs_and_pieces_as_the_reference(tokenizer, oracle, text):
    pieces = list(reference_pieces(text))
    assert "".join(pieces) == text
    want = [i for piece in pieces for i in oracle.encode_ordinary(piece)]
    assert tokenizer.encode(text) == want
    assert (PIECE_CHARS, RUN_CHARS) == (400_000, 25_000)


def test_long_run_is_cut_inside_a_token(tokenizer, oracle):
    """The limit is visible: character 25,000 falls into "return", which is one token otherwise."""
    text = "_" * (RUN_CHARS - 2) + "return"
    assert tokenizer.encode(text) == oracle.encode_ordinary(text[:-4]) + oracle.encode_ordinary("turn")
    assert tokenizer.encode(text) != oracle.encode_ordinary(text)


def test_token_bytes(tokenizer, oracle):
    blob, ends = tokenizer.token_bytes()
    assert len(ends) == tokenizer.n_vocab == 4096 and ends[-1] == len(blob)
    starts = [0, *ends[:-1]]
    for i, (a, b) in enumerate(zip(starts, ends, strict=True)):
        if i < tokenizer.n_ranks:
            assert blob[a:b] == oracle.decode_single_token_bytes(i)
        else:
            assert a == b, "a special token has bytes"


def test_decode_names_the_bad_id(tokenizer):
    for bad in (-1, 4096, 1 << 40):
        with pytest.raises(TokenizerError, match=rf"{bad} is no token .* 0 to 4095"):
            tokenizer.decode_bytes([0, bad])


# ---- reading -----------------------------------------------------------------------------------------------

BYTES = [b"%s %d" % (base64.b64encode(bytes([b])), b) for b in range(256)]


def write(tmp_path, *more):
    path = tmp_path / "tiktoken.model"
    path.write_bytes(b"\n".join([*BYTES, *more]) + b"\n")
    return path


def test_reads_a_good_file_in_any_order_with_crlf(tmp_path):
    path = tmp_path / "tiktoken.model"
    path.write_bytes(b"\r\n".join(reversed(BYTES)) + b"\r\n\r\n")
    assert read_ranks(path) == {bytes([b]): b for b in range(256)}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"YWI=", "257: is not a base64 token"),
        (b"YWI= 256 1", "257: is not a base64 token"),
        (b"YWI=  256", "257: is not a base64 token"),
        (b"YWI= -1", "257: is not a base64 token"),
        (b"YWI= 2x", "257: is not a base64 token"),
        (b"YWI= 99999999999", "257: is not a base64 token"),
        (b"YW!= 256", "257: the token is not base64"),
        (b"YWI 256", "257: the token is not base64"),
        (b"YW!I= 256", "257: the token is not base64"),
        (b" 256", "257: a token of 0 bytes"),
        (base64.b64encode(b"x" * 257) + b" 256", "257: a token of 257 bytes"),
        (b"YQ== 256", "257: the token is the one of rank 97 again"),
        (b"YWI= 255", "257: rank 255 appears twice"),
        (b"YWI= 257", "rank 256 is missing"),
        (b"YWI= 1000000", "257: rank 1000000; a vocabulary has at most"),
        ("YWI= \u0662".encode(), "257: is not a base64 token"),
    ],
)
def test_damaged_ranks_name_file_and_line(tmp_path, line, says):
    path = write(tmp_path, line)
    with pytest.raises(TokenizerError) as error:
        read_ranks(path)
    assert str(path) in str(error.value) and says in str(error.value)


def test_a_file_cut_short_is_noticed(tmp_path):
    path = tmp_path / "tiktoken.model"
    path.write_bytes(b"\n".join(BYTES[:200]) + b"\n")
    with pytest.raises(TokenizerError, match="56 of the 256 single bytes are no tokens"):
        read_ranks(path)
    with pytest.raises(TokenizerError, match="cannot be read .*needs it to serve text"):
        read_ranks(tmp_path / "absent")


def test_a_rewritten_file_is_read_again(tmp_path):
    path = write(tmp_path, b"YWI= 256")
    assert read_ranks(path)[b"ab"] == 256
    write(tmp_path, b"YWM= 256")
    assert b"ab" not in read_ranks(path)


def special(tmp_path, entries, raw=None):
    path = tmp_path / "tokenizer_config.json"
    path.write_text(raw if raw is not None else json.dumps({"added_tokens_decoder": entries}))
    return read_special(path, 256)


def test_special_slots_without_an_entry_get_kimis_names(tmp_path):
    found = special(tmp_path, {"256": {"content": "[BOS]"}, "259": {"content": "[PAD]"}})
    assert found == {"[BOS]": 256, "[PAD]": 259, "<|reserved_token_257|>": 257, "<|reserved_token_258|>": 258}


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"255": {"content": "[X]"}}, "id 255, which tiktoken.model uses for ordinary text"),
        ({"256": {"content": "[X]"}, "257": {"content": "[X]"}}, "appears twice"),
        ({"256": {"content": "[X]"}, "0256": {"content": "[Y]"}}, "appears twice"),
        ({"-1": {"content": "[X]"}}, "no token id"),
        ({"x": {"content": "[X]"}}, "no token id"),
        (
            {"256": {"content": ""}},
            'added_tokens_decoder.256.content is "", a string of 1 to 256 bytes should stand there',
        ),
        ({"256": {}}, "added_tokens_decoder.256.content is missing"),
        ({"256": "[X]"}, 'added_tokens_decoder.256 is "[X]", an object should stand there'),
        ({"256": {"content": 7}}, "added_tokens_decoder.256.content is 7, a string should stand there"),
        ({"256": {"content": "x" * 300}}, 'xxx...", a string of 1 to 256 bytes should stand there'),
        ({"1000000": {"content": "[X]"}}, "ids are below"),
        ([], "added_tokens_decoder is a list of 0, an object should stand there"),
    ],
)
def test_damaged_specials(tmp_path, entries, says):
    with pytest.raises(TokenizerError) as error:
        special(tmp_path, entries)
    assert says in str(error.value) and "tokenizer_config.json" in str(error.value)


@pytest.mark.parametrize(
    "raw", ["", "{", "[1]", "nul", "[" * 100_000, '{"added_tokens_decoder": {}, "added_tokens_decoder": {}}', "\udcff"]
)
def test_damaged_json(tmp_path, raw):
    path = tmp_path / "tokenizer_config.json"
    path.write_bytes(raw.encode("utf-8", "surrogateescape"))
    with pytest.raises(TokenizerError, match="tokenizer_config.json"):
        read_special(path, 256)
