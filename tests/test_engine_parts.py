"""The host-side parts of the engine on their own: page accounts with the prefix trie, and text with stop strings."""

import ctypes
import random

import pytest

PAGE = 64


@pytest.fixture(scope="module")
def lib(test_library):
    lib = ctypes.CDLL(str(test_library))
    for name in ("kd_probe_cache_new", "kd_probe_text_new"):
        getattr(lib, name).restype = ctypes.c_void_p
    return lib


def ints(values):
    return (ctypes.c_int32 * max(len(values), 1))(*values)


class Cache:
    def __init__(self, lib, pages):
        self.lib, self.p = lib, ctypes.c_void_p(lib.kd_probe_cache_new(pages))

    def close(self):
        self.lib.kd_probe_cache_delete(self.p)

    def free(self):
        return self.lib.kd_probe_cache_free(self.p)

    def cached(self):
        return self.lib.kd_probe_cache_cached(self.p)

    def match(self, tokens):
        pages, copy_from, rows = ints([-1] * (len(tokens) // PAGE + 1)), ctypes.c_int32(), ctypes.c_int()
        n = self.lib.kd_probe_cache_match(
            self.p, ints(tokens), len(tokens), pages, ctypes.byref(copy_from), ctypes.byref(rows)
        )
        return list(pages[:n]), copy_from.value, rows.value

    def allocate(self, count):
        pages = ints([-1] * count)
        return list(pages[:count]) if self.lib.kd_probe_cache_allocate(self.p, pages, count) else None

    def publish(self, tokens, pages):
        self.lib.kd_probe_cache_publish(self.p, ints(tokens), len(tokens), ints(pages), len(pages))

    def release(self, pages):
        self.lib.kd_probe_cache_release(self.p, ints(pages), len(pages))


@pytest.fixture
def cache(lib):
    made = Cache(lib, 12)
    yield made
    made.close()


def test_a_published_prompt_is_shared_by_page_and_copied_by_row(cache):
    prompt = list(range(150))
    pages = cache.allocate(4)
    cache.publish(prompt, pages)
    assert cache.match(prompt[:64]) == (pages[:1], -1, 0)
    shared, copy_from, rows = cache.match(prompt[:140] + [9999] * 30)
    assert (shared, copy_from, rows) == (pages[:2], pages[2], 12)
    assert cache.match([1, 2, 3]) == ([], -1, 0)
    assert cache.match([0, 1, 5]) == ([], pages[0], 2)


def test_pages_in_use_are_never_given_away(cache):
    prompt = list(range(128))
    pages = cache.allocate(2)
    cache.publish(prompt, pages)
    cache.release(pages)
    assert (cache.free(), cache.cached()) == (10, 2)
    shared, _, _ = cache.match(prompt)
    assert shared == pages and cache.cached() == 0
    assert cache.allocate(11) is None
    assert cache.free() == 10  # a refusal changes nothing
    assert cache.allocate(10) is not None
    cache.release(shared)
    assert set(cache.allocate(2)) == set(pages)  # evicted now that nobody reads them
    assert cache.match(prompt) == ([], -1, 0)


def test_equal_prompts_published_twice_do_not_hang_below_each_other(cache):
    """Two sequences prefilled the same prompt at once. The second's pages must not become children of the first's: when the
    first ends its pages are evictable, and everything counted as cached must be."""
    prompt = list(range(64))
    first, second = cache.allocate(2), cache.allocate(2)
    cache.publish(prompt + [1, 2], first)
    cache.publish(prompt + [3, 4], second)
    cache.release(first)
    assert cache.cached() == 2
    assert cache.allocate(10) is not None


@pytest.mark.parametrize("seed", range(8))
def test_random_use_keeps_the_accounts(lib, seed):
    """Against a model: no page has two owners, what matches was published, and in the end every page is free or cached."""
    rng = random.Random(seed)
    cache = Cache(lib, 24)
    live, published = [], set()
    for _ in range(400):
        if live and rng.random() < 0.45:
            prompt, pages = live.pop(rng.randrange(len(live)))
            cache.release(pages)
            continue
        stem = [rng.randrange(3)] * rng.choice((10, 64, 100, 128))
        prompt = stem + [rng.randrange(2) for _ in range(rng.randrange(1, 90))]
        shared, copy_from, rows = cache.match(prompt[:-1])
        known = len(shared) * PAGE + rows
        assert known < len(prompt)
        assert known == 0 or any(p[:known] == tuple(prompt[:known]) for p in published)
        fresh = cache.allocate(-(-len(prompt) // PAGE) + 1 - len(shared))
        if copy_from >= 0:
            cache.release([copy_from])
        if fresh is None:
            cache.release(shared)
            continue
        pages = shared + fresh
        for _, other in live:
            assert not set(fresh) & set(other)
        cache.publish(prompt, pages)
        published.add(tuple(prompt))
        live.append((prompt, pages))
    for _, pages in live:
        cache.release(pages)
    assert cache.free() + cache.cached() == 24
    assert len(cache.allocate(24)) == 24
    cache.close()


# ---- text -------------------------------------------------------------------------------------------------------------


def stream(lib, stops, pieces):
    """Feed `pieces`; returns what was released piece by piece, and whether a stop string ended it."""
    stops = [s.encode() if isinstance(s, str) else s for s in stops]
    array = (ctypes.c_char_p * max(len(stops), 1))(*stops)
    lengths = (ctypes.c_uint32 * max(len(stops), 1))(*map(len, stops))
    text = ctypes.c_void_p(lib.kd_probe_text_new(array, lengths, len(stops)))
    out, stopped, released = ctypes.create_string_buffer(1 << 16), ctypes.c_int(), []
    for piece in pieces:
        n = lib.kd_probe_text_add(text, piece, len(piece), out, ctypes.byref(stopped))
        released.append(out.raw[:n])
        if stopped.value:
            break
    else:
        n = lib.kd_probe_text_add(text, b"", -1, out, ctypes.byref(stopped))
        released.append(out.raw[:n])
        stopped.value = 0
    lib.kd_probe_text_delete(text)
    return released, bool(stopped.value)


def test_text_is_cut_between_characters_only(lib):
    whole = "a é 世界 🎉 z".encode()
    for pieces in ([whole[i : i + 1] for i in range(len(whole))], [whole[:5], whole[5:9], whole[9:]]):
        released, stopped = stream(lib, [], pieces)
        assert b"".join(released) == whole and not stopped
        for part in released:
            part.decode()  # raises if a cut fell inside a character


def test_dead_bytes_pass_through(lib):
    broken = b"ok \xff\xfe \xc3( \xf0\x9f"  # invalid, then an incomplete character at the end
    released, _ = stream(lib, [], [broken[i : i + 1] for i in range(len(broken))])
    assert b"".join(released) == broken


@pytest.mark.parametrize("seed", range(200))
def test_any_chunking_gives_the_same_text(lib, seed):
    """Text and stop position depend on the bytes, not on how they came; nothing that could become a stop string leaks."""
    rng = random.Random(seed)
    alphabet = ["a", "b", "é", "界", "🎉", "\n"]
    whole = "".join(rng.choice(alphabet) for _ in range(40)).encode()
    stops = ["".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 4))) for _ in range(rng.randrange(0, 4))]
    hits = [whole.find(s.encode()) for s in stops if s.encode() in whole]
    # Byte by byte the first stop to be complete ends the text.
    ends = [(whole.find(s.encode()) + len(s.encode()), whole.find(s.encode())) for s in stops if s.encode() in whole]
    want = whole[: min(at for end, at in ends if end == min(ends)[0])] if hits else whole
    cuts = sorted(rng.sample(range(1, len(whole)), 12))
    for edges in (range(len(whole) + 1), [0, *cuts, len(whole)], [0, len(whole)]):
        pieces = [whole[a:b] for a, b in zip(edges, edges[1:], strict=False)]
        released, stopped = stream(lib, stops, pieces)
        assert b"".join(released) == want and stopped == bool(hits)
        for part in released:
            part.decode()


def test_only_a_possible_stop_string_is_held_back(lib):
    released, _ = stream(lib, ["###"], [b"abc", b"#", b"#", b"x"])
    assert released == [b"abc", b"", b"", b"##x", b""]
