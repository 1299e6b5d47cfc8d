"""The executable specification: every operation of native/ops.h in numpy, float64 inside, and the whole model.

Tests import it as `ref` (pytest puts tests/ on sys.path). `ref.OPS` maps the name of an op to
`Op(spec, cases, tolerance, outputs)`:

    for case in op.cases(np.random.default_rng(0)):    # case: dict of keyword arguments
        want = op.spec(**case)                          # one array, or a tuple named by op.outputs

Keyword arguments have the names of the op's parameters in ops.h (`from` is `from_`), without outputs that are only
written and without sizes that follow from the arrays (n_rows, n_out, width, stride; `n` of copy_rows is kept). What an
op updates in place (x of add_norm, y of moe, kv of mla_latent and kv_commit, k_pool, v_pool, ring, `to` of copy_rows,
x of head_norm_rope) goes in as an argument and comes out as a result; the specification never writes to its arguments.

Representation
    Rows, Vec, pools   float32 [rows][width], without padding: a harness adds strides, offsets and poison of its own
    Mat                uint16 [n][k], bf16 bits
    W4                 ref.W4(q uint32 [n][k/8], s uint16 [n][k/32])
    Experts            ref.Experts(gate_up W4, down W4, count): matrices of the experts back to back
    Rope               ref.Rope(cos, sin) float32 [max_positions][pairs]
    Shape, DraftShape  ref.Shape, ref.DraftShape: the fields of native/types.h
    View               dict: token, position, stream, slot, prefix int32 [n_rows]; mask uint64 [n_rows][5];
                       page_table int32 [n_streams][max_pages]; out_row int32 [n_out]
    Sampling           list of ref.Sampling, one a stream
    Choice             dict: token int32, hash uint64, logprob float32 [n_out]
    Trees              dict: first_row int32 [n_streams + 1], parent int32 [n_rows]
    Accepted           dict: n int32 [n_streams], node int32 [n_streams][17]; of `node` only [s][:n[s]] means anything
                       (the specification has -1 beyond)
    pools              [pages * 64][width]

Poison is part of the cases: pool rows that no row of the view sees are NaN, page ids past a stream's pages are wild.

Collectives. add_norm takes y [ranks][n][width], the ranks' partial sums. top_logprobs and sample take the logits of the
whole vocabulary, [n][vocab]: give rank r the columns [vocab_begin, vocab_begin + vocab_rank); every rank must return
the same.
"""

from . import accept, draft, kv, linear, mla, model, moe, plan, rows, sample, tree
from .base import (
    MASK_WORDS,
    MAX_DEPTH,
    MAX_NODES,
    PAGE,
    W4,
    WILD,
    DraftShape,
    Experts,
    Op,
    Rope,
    Sampling,
    Shape,
    bf16,
    dequantise,
    f64,
    pack4,
    unpack4,
)

OPS = {
    name: op
    for module in (rows, linear, mla, moe, draft, sample, plan, tree, accept)
    for name, op in module.OPS.items()
}

__all__ = [
    "MASK_WORDS",
    "MAX_DEPTH",
    "MAX_NODES",
    "OPS",
    "PAGE",
    "W4",
    "WILD",
    "DraftShape",
    "Experts",
    "Op",
    "Rope",
    "Sampling",
    "Shape",
    "accept",
    "bf16",
    "dequantise",
    "draft",
    "f64",
    "kv",
    "linear",
    "mla",
    "model",
    "moe",
    "plan",
    "pack4",
    "rows",
    "sample",
    "tree",
    "unpack4",
]
