"""Suggestions for unknown keys."""

from collections.abc import Collection
from difflib import get_close_matches

#: names of keys in other programs -> ours
_USUAL_NAMES = {
    **dict.fromkeys(("batch_size", "train_batch_size"), "data.global_batch"),
    **dict.fromkeys(
        ("block_size", "context_length", "max_seq_len", "sequence_length"), "data.seq_len"
    ),
    **dict.fromkeys(("hidden_size", "n_embd", "dim"), "model.backbone.d_model"),
    **dict.fromkeys(("steps", "max_iters", "num_steps"), "trainer.max_steps"),
    **dict.fromkeys(("gpus", "num_gpus"), "trainer.devices"),
    "seed": "seed_everything",
}


def closest_key(key: str, known: Collection[str]) -> str | None:
    """Return the known key that is meant by an unknown one; None if none is close.

    >>> closest_key("model.lr", ["data.seq_len", "model.optim.lr"])
    'model.optim.lr'
    """
    leaf = key.rpartition(".")[2]
    usual = _USUAL_NAMES.get(leaf)
    if usual in known:
        return usual
    leaf_keys = {name.rpartition(".")[2]: name for name in known}
    if leaf in leaf_keys:
        return leaf_keys[leaf]
    near_keys = get_close_matches(key, known, n=1, cutoff=0.7)
    if near_keys:
        return near_keys[0]
    near_leaves = get_close_matches(leaf, leaf_keys, n=1, cutoff=0.7)
    return leaf_keys[near_leaves[0]] if near_leaves else None
