"""Runs native operations: the keyword arguments of ref's specifications in, arrays out, by way of native/probe.h.

    probes = Probes(path of the test library)
    y, = probes.rms_norm(Device(threads=2), x=x, w=w, eps=1e-5)

Every method has the name of an operation and the arguments of ref.OPS[name].spec, and returns a tuple of arrays named by
ref.OPS[name].outputs. A failure of the operation, a write outside its results or a difference between ranks raises
ProbeError.
"""

import re
import weakref
from pathlib import Path
from typing import NamedTuple

import backend
import cffi
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
ISAS = backend.isas()


def cdef(header: Path) -> str:
    """The part of a header that cffi reads."""
    return re.search(r"/\* cdef: begin \*/(.*)/\* cdef: end \*/", header.read_text(), re.S)[1]


class Device(NamedTuple):
    isa: str = next(iter(ISAS))
    threads: int = 1  # of each rank
    tp: int = 1
    more: int = 0  # numbers of rows and streams are data, and there could be so many more
    transport: str = ""  # of the ranks; empty: the twin's choice


class ProbeError(Exception):
    pass


class Probes:
    def __init__(self, library: Path):
        self.ffi = cffi.FFI()
        self.ffi.cdef(cdef(ROOT / "include" / "kd.h"))
        self.ffi.cdef(cdef(ROOT / "native" / "probe.h"))
        self.lib = self.ffi.dlopen(str(library))
        self._alive = weakref.WeakKeyDictionary()

    def has(self, isa: str) -> bool:
        return self.lib.kd_probe_isa(ISAS[isa][0]) == 0

    # ---- arguments ---------------------------------------------------------------------------------------------------

    def _run(self, name, device, *args):
        isa, aligned = ISAS[device.isa]
        transport = self.ffi.new("char[]", device.transport.encode()) if device.transport else self.ffi.NULL
        where = self.ffi.new(
            "kd_probe_device *", [device.tp, device.threads * device.tp, isa, aligned, device.more, transport]
        )
        if getattr(self.lib, f"kd_probe_{name}")(where, *args) != 0:
            raise ProbeError(self.ffi.string(self.lib.kd_probe_error()).decode())

    def _array(self, ctype, dtype, a):
        if a is None:
            return self.ffi.NULL
        return self.ffi.from_buffer(f"{ctype}[]", np.ascontiguousarray(a, dtype))

    def _f(self, a):
        return self._array("float", np.float32, a)

    def _i(self, a):
        return self._array("int32_t", np.int32, a)

    def _h(self, a):
        return self._array("uint16_t", np.uint16, a)

    def _u(self, a):
        return self._array("uint32_t", np.uint32, a)

    def _q(self, a):
        return self._array("uint64_t", np.uint64, a)

    def _struct(self, ctype, **fields):
        """A struct whose arrays live as long as itself."""
        s = self.ffi.new(f"{ctype} *", fields)
        self._alive[s] = fields
        return s

    def _view(self, v):
        n_streams, max_pages = v["page_table"].shape
        return self._struct(
            "kd_probe_view", n_rows=len(v["token"]), n_streams=n_streams, n_out=len(v["out_row"]), max_pages=max_pages,
            mask=self._q(v["mask"]),
            **{name: self._i(v[name]) for name in ("token", "position", "stream", "slot", "prefix", "page_table", "out_row")},
        )  # fmt: skip

    def _rope(self, rope):
        positions, pairs = rope.cos.shape
        return self._struct(
            "kd_probe_rope", cos=self._f(rope.cos), sin=self._f(rope.sin), positions=positions, pairs=pairs
        )

    def _shape(self, s):
        return self._struct("kd_probe_shape", **vars(s))

    def _draft_shape(self, d):
        return self._struct("kd_probe_draft_shape", heads_rank=d.heads_rank, kv_heads_rank=d.kv_heads_rank,
                            head_dim=d.head_dim, block=d.block)  # fmt: skip

    def _trees(self, t):
        return self._struct("kd_probe_trees", first_row=self._i(t["first_row"]), parent=self._i(t["parent"]))

    def _kept_rows(self, kept):
        return self._struct("kd_probe_kept", n=self._i(kept["n"]), node=self._i(kept["node"]))

    # ---- rows --------------------------------------------------------------------------------------------------------

    def embed(self, device, token, table, vocab_begin):
        y = floats(len(token), table.shape[1])
        self._run("embed", device, self._f(y), self._i(token), self._h(table), *table.shape, vocab_begin, len(token))
        return (y,)

    def zero(self, device, x):
        x = owned(x)
        self._run("zero", device, self._f(x), *x.shape)
        return (x,)

    def copy_rows(self, device, to, to_row, from_, from_row, n):
        to = owned(to)
        self._run("copy_rows", device, self._f(to), self._i(to_row), self._f(from_), self._i(from_row), n, len(to), len(from_),
                  to.shape[1])  # fmt: skip
        return (to,)

    def rms_norm(self, device, x, w, eps):
        y = floats(*x.shape)
        self._run("rms_norm", device, self._f(y), self._f(x), self._f(w), *x.shape, eps)
        return (y,)

    def add_norm(self, device, x, y, w, eps):
        h, x = floats(*x.shape), owned(x)
        self._run("add_norm", device._replace(tp=len(y)), self._f(h), self._f(x), self._f(y), self._f(w), *x.shape, eps)
        return h, x

    def add_norms(self, device, x, y, w, counts, eps):
        """Calls of add_norm one after the other, y [ranks][calls][n][width], counts [calls] of rows."""
        h, x = floats(*x.shape), owned(x)
        self._run("add_norms", device._replace(tp=len(y)), self._f(h), self._f(x), self._f(y), self._f(w), self._i(counts),
                  len(counts), *x.shape, eps)  # fmt: skip
        return h, x

    def keep_tap(self, device, x):
        tap = floats(*x.shape)
        self._run("keep_tap", device, self._f(tap), self._f(x), *x.shape)
        return (tap,)

    # ---- linear ------------------------------------------------------------------------------------------------------

    def linear(self, device, x, w, name="linear"):
        y = floats(len(x), len(w))
        self._run(name, device, self._f(y), self._f(x), self._h(w), len(x), *w.shape)
        return (y,)

    def logits(self, device, x, w):
        return self.linear(device, x, w, "logits")

    def swiglu(self, device, x):
        y = floats(len(x), x.shape[1] // 2)
        self._run("swiglu", device, self._f(y), self._f(x), *y.shape)
        return (y,)

    # ---- attention of the target -------------------------------------------------------------------------------------

    def mla_query(self, device, q, k_up, rope, v, s):
        q_lat = floats(len(q), s.heads_rank * s.kv_row)
        self._run("mla_query", device, self._f(q_lat), self._f(q), self._h(k_up), self._rope(rope), self._view(v),
                  self._shape(s))  # fmt: skip
        return (q_lat,)

    def mla_latent(self, device, kv, qkv_a, q_norm, q_b, kv_norm, rope, v, s):
        q, kv = floats(len(qkv_a), s.heads_rank * (s.nope + s.rope)), owned(kv)
        self._run("mla_latent", device, self._f(q), self._f(kv), self._f(owned(qkv_a)), self._f(q_norm), self._h(q_b),
                  self._f(kv_norm), self._rope(rope), self._view(v), len(kv), self._shape(s))  # fmt: skip
        return q, kv

    def mla_attention(self, device, q_lat, kv, v, s):
        o_lat = floats(len(q_lat), s.heads_rank * s.kv_lora)
        self._run(
            "mla_attention", device, self._f(o_lat), self._f(q_lat), self._f(kv), self._view(v), len(kv), self._shape(s)
        )
        return (o_lat,)

    def mla_value(self, device, o_lat, v_up, s):
        o = floats(len(o_lat), s.heads_rank * s.v_head)
        self._run("mla_value", device, self._f(o), self._f(o_lat), self._h(v_up), len(o), self._shape(s))
        return (o,)

    # ---- experts -----------------------------------------------------------------------------------------------------

    def route(self, device, h, router, bias, s):
        expert, weight = np.empty((len(h), s.experts_per_token), np.int32), floats(len(h), s.experts_per_token)
        self._run("route", device, self._i(expert), self._f(weight), self._f(h), self._f(router), self._f(bias), len(h),
                  self._shape(s))  # fmt: skip
        return expert, weight

    def pack_experts(self, device, w, s):
        arrays = [np.array(a, order="C") for a in (*w.gate_up, *w.down)]
        self._run("pack_experts", device, self._u(arrays[0]), self._h(arrays[1]), self._u(arrays[2]),
                  self._h(arrays[3]), w.count, self._shape(s))  # fmt: skip
        return tuple(arrays)

    def moe(self, device, y, h, expert, weight, w, s):
        y = owned(y)
        self._run("moe", device, self._f(y), self._f(h), self._i(expert), self._f(weight), self._u(w.gate_up.q),
                  self._h(w.gate_up.s), self._u(w.down.q), self._h(w.down.s), w.count, len(y), self._shape(s))  # fmt: skip
        return (y,)

    # ---- drafter -----------------------------------------------------------------------------------------------------

    def head_norm_rope(self, device, x, norm, rope, v, heads, head_dim, eps):
        x = owned(x)
        self._run(
            "head_norm_rope", device, self._f(x), self._f(norm), self._rope(rope), self._view(v), heads, head_dim, eps
        )
        return (x,)

    def draft_append(self, device, k_pool, v_pool, k, v, view, d):
        k_pool, v_pool = owned(k_pool), owned(v_pool)
        self._run("draft_append", device, self._f(k_pool), self._f(v_pool), self._f(k), self._f(v), self._view(view),
                  len(k_pool), self._draft_shape(d))  # fmt: skip
        return k_pool, v_pool

    def draft_attention(self, device, qkv, k_pool, v_pool, v, window, causal, d):
        o = floats(len(qkv), d.heads_rank * d.head_dim)
        self._run("draft_attention", device, self._f(o), self._f(qkv), self._f(k_pool), self._f(v_pool), self._view(v),
                  window, causal, len(k_pool), self._draft_shape(d))  # fmt: skip
        return (o,)

    def top_logprobs(self, device, logits, k, s=None):
        identity, logprob = np.empty((len(logits), k), np.int32), floats(len(logits), k)
        self._run("top_logprobs", device, self._i(identity), self._f(logprob), self._f(logits), len(logits), k,
                  logits.shape[1])  # fmt: skip
        return identity, logprob

    # ---- sampling and acceptance -------------------------------------------------------------------------------------

    def sample(self, device, logits, sampling, v, s=None):
        n = len(logits)
        token, hashes, logprob = np.empty(n, np.int32), np.empty(n, np.uint64), floats(n)
        ways = self.ffi.new("kd_probe_sampling[]", [vars(way) for way in sampling])
        self._run("sample", device, self._i(token), self._q(hashes), self._f(logprob), self._f(logits), ways, self._view(v),
                  logits.shape[1])  # fmt: skip
        return token, hashes, logprob

    def tree_build(self, device, token, logprob, drafts, budget, stride):
        streams = len(budget)
        n = np.empty(streams, np.int32)
        node_token, node_parent = (np.empty((streams, stride), np.int32) for _ in range(2))
        self._run("tree_build", device, self._i(n), self._i(node_token), self._i(node_parent), self._i(token),
                  self._f(logprob), self._i(drafts["row"]), self._i(drafts["depths"]),
                  self._i(drafts.get("width")), self._i(budget), streams,
                  *token.shape, stride)  # fmt: skip
        return n, node_token, node_parent

    def tree_accept(self, device, trees, choice, v):
        streams = len(v["page_table"])
        n, node = np.empty(streams, np.int32), np.empty((streams, 17), np.int32)
        self._run(
            "tree_accept",
            device,
            self._i(n),
            self._i(node),
            self._trees(trees),
            self._i(choice["token"]),
            self._view(v),
        )
        return n, node

    # ---- a round's rows --------------------------------------------------------------------------------------------------

    def _streams(self, s):
        n, max_pages = s["page_table"].shape
        return self._struct("kd_probe_streams", n=n, max_pages=max_pages, **{name: self._i(a) for name, a in s.items()})

    def _rows(self, most, most_out):
        """A kd_probe_rows to write to, and its arrays."""
        a = {name: np.zeros(most, np.int32) for name in ("token", "position", "stream", "slot", "prefix")}
        a |= {
            "counts": np.zeros(2, np.int32),
            "out_row": np.zeros(most_out, np.int32),
            "mask": np.zeros((most, 5), np.uint64),
        }
        pointers = {name: self._q(x) if name == "mask" else self._i(x) for name, x in a.items()}
        return self._struct("kd_probe_rows", most=most, most_out=most_out, **pointers), a

    def plan_context(self, device, streams, most, ring_rows):
        rows, a = self._rows(most, 0)
        draft_start, ring_row = np.zeros(len(streams["start"]), np.int32), np.zeros(most, np.int32)
        self._run(
            "plan_context", device, rows, self._i(draft_start), self._i(ring_row), self._streams(streams), ring_rows
        )
        n = a["counts"][0]
        return draft_start, a["counts"], *(a[k][:n] for k in ("position", "stream", "slot", "prefix")), ring_row[:n]

    def plan_draft(self, device, streams, d, s):
        count = len(streams["start"])
        rows, a = self._rows(count * d.block, count * (d.block - 1))
        row, depths = np.zeros(count, np.int32), np.zeros(count, np.int32)
        self._run("plan_draft", device, rows, self._i(row), self._i(depths), self._streams(streams), d.block, d.mask_token,
                  s.max_positions)  # fmt: skip
        n, out = a["counts"]
        written = (a[k][:n] for k in ("token", "position", "stream", "slot", "prefix"))
        return row, depths, a["counts"], *written, a["out_row"][:out]

    def plan_verify(self, device, streams, nodes):
        most = int(len(nodes["n"]) + nodes["n"].sum())
        rows, a = self._rows(most, most)
        first_row, parent = np.zeros(len(nodes["n"]) + 1, np.int32), np.zeros(most, np.int32)
        self._run("plan_verify", device, rows, self._i(first_row), self._i(parent), self._streams(streams),
                  self._i(nodes["n"]), self._i(nodes["token"]), self._i(nodes["parent"]), nodes["token"].shape[1])  # fmt: skip
        n = a["counts"][0]
        written = (a[k][:n] for k in ("token", "position", "stream", "slot", "prefix", "out_row", "mask"))
        return first_row, parent[:n], a["counts"], *written

    def end_round(self, device, streams, trees, kept, choice, round_):
        count, rounds = len(streams["start"]), round_ + 1
        n, nodes, draft_start = (np.zeros((rounds, count), np.int32) for _ in range(3))
        start, root, left = (np.zeros(count, np.int32) for _ in range(3))
        token, hashes = np.zeros((rounds, count, 17), np.int32), np.zeros((rounds, count, 17), np.uint64)
        logprob, ended = np.zeros((rounds, count, 17), np.float32), np.zeros(1, np.int32)
        self._run("end_round", device, self._i(n), self._i(nodes), self._i(token), self._q(hashes), self._f(logprob),
                  self._i(draft_start), self._i(ended), self._i(start), self._i(root), self._i(left), round_,
                  self._streams(streams), self._trees(trees), self._kept_rows(kept), self._i(choice["token"]),
                  self._q(choice["hash"]), self._f(choice["logprob"]), len(choice["token"]))  # fmt: skip
        return n, nodes, token, hashes, logprob, draft_start, ended, start, root, left

    def kv_commit(self, device, kv, kept, trees, v):
        kv = owned(kv)
        self._run("kv_commit", device, self._f(kv), self._kept_rows(kept), self._trees(trees), self._view(v), *kv.shape)
        return (kv,)

    def keep_taps(self, device, ring, taps, ring_slot, kept, trees, v, ring_rows):
        ring = owned(ring)
        self._run("keep_taps", device, self._f(ring), self._f(taps), self._i(ring_slot), self._kept_rows(kept),
                  self._trees(trees), self._view(v), ring_rows, len(ring) // ring_rows, ring.shape[1])  # fmt: skip
        return (ring,)


def floats(*shape):
    return np.empty(shape, np.float32)


def owned(a):
    """A copy that the probe may overwrite."""
    return np.array(a, np.float32, order="C")
