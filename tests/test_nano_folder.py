"""What models/nano carries beside the model: its size, and the record for simulations of tree builders."""

import numpy as np


def test_the_folder_stays_small(nano):
    assert sum(f.stat().st_size for f in nano.rglob("*") if f.is_file()) <= 24 << 20


def tokens_per_round(answer, ids) -> float:
    """Of a chain of 7: the drafter's best token of each depth is kept as long as the target says the same."""
    at = rounds = 0
    while at < len(ids):
        chain, next_ = ids[at, :7, 0], answer[at + 1 : at + 8]
        same = chain[: len(next_)] == next_
        at += 1 + (len(same) if same.all() else int(np.argmin(same)))
        rounds += 1
    return min(at, len(answer) - 1) / rounds


def test_marginals_are_drafts_of_the_answers(nano):
    record = np.load(nano / "marginals.npz")
    answers = [k for k in record if k.startswith("answer_")]
    assert len(answers) == 8 and len(record.files) == 24
    rates = []
    for name in answers:
        answer, ids, scores = (record[name.replace("answer", kind)] for kind in ("answer", "ids", "scores"))
        assert ids.shape == scores.shape == (len(ids), 15, 8) and 0 < len(ids) < len(answer)
        assert (scores <= 0).all() and (np.diff(scores.astype(np.float32), axis=-1) <= 0).all()
        assert all(len(set(row)) == 8 for row in ids.reshape(-1, 8).tolist())
        rates.append(tokens_per_round(answer, ids))
    assert np.mean(rates) > 1.8  # of tokens that belong to other drafts: 1.1
    shifted = [tokens_per_round(np.roll(record[n], 3), record[n.replace("answer", "ids")]) for n in answers]
    assert np.mean(shifted) < 1.4
