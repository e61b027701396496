"""Hostile strategy strings, configs, checkpoints and corpora: read as they are, or refused with one
sentence."""

from __future__ import annotations

import copy
import gzip
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lightning_sv import Backbone, BackboneConfig, ScaleStrategy
from lightning_sv.corpus import CorpusConfig, Manifest, Tokenizer, check_corpus, open_split, prepare
from lightning_sv.corpus.validate import STAMP
from lightning_sv.errors import ConfigError
from lightning_sv.lit.run_arguments import parse_run
from lightning_sv.runs.checkpoint import CHECKPOINT_KEY, FORMAT, load_backbone
from lightning_sv.scale import ScaleOptions
from lightning_sv.scale.strategy import AXES, PRESETS
from tests.faults.conftest import Tally

#: values that a key of JSON or YAML did not expect
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 0, 1 << 31, 1 << 63, 1 << 64, 10**400]),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(
        [
            "",
            "..",
            "../x",
            "/etc/passwd",
            "C:\\x",
            "a\\..\\..\\b",
            "\0",
            "\ud800",
            "${oc.env:HOME}",
            "os:system",
        ]
    ),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
)


def few_and(n: int) -> pytest.MarkDecorator:
    """Run a test with 20 inputs, and with `n` of them under the mark `faults`."""
    return pytest.mark.parametrize("n", [20, pytest.param(n, marks=pytest.mark.faults)])


def fuzz(
    tally: Tally,
    fault: str,
    n: int,
    good: Any,
    hostile: st.SearchStrategy[Any],
    act: Callable[[Any], object],
) -> None:
    """Count `n` inputs, the same ones in every session: accepted, or refused with a sentence, is
    recovered.

    `good` must be accepted: otherwise all inputs made from it would be refused for one reason.
    """
    act(good)

    @settings(
        max_examples=n,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        # a failing input is reported as found: shrinking would count it often
        phases=(Phase.explicit, Phase.generate),
    )
    @given(hostile)
    def run(value: Any) -> None:
        try:
            act(value)
        except ConfigError as error:
            tally(fault, bool(str(error).strip()), "a refusal without a word")
        else:
            tally(fault, True)

    run()


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return every place in nested dictionaries and lists, the top excepted."""
    children: dict[Any, Any] = {}
    if isinstance(value, dict):
        children = value
    elif isinstance(value, list | tuple):
        children = dict(enumerate(value))
    found = [path] if path else []
    for key, child in children.items():
        found += leaves(child, (*path, key))
    return found


@st.composite
def edited(draw: st.DrawFn, good: Any, odd: st.SearchStrategy[Any] = ODD) -> Any:
    """`good` with up to three places replaced, removed or doubled."""
    value = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 3))):
        places = leaves(value)
        if not places:
            break
        *way, last = draw(st.sampled_from(places))
        parent = value
        for key in way:
            parent = parent[key]
        if isinstance(parent, tuple):
            continue
        match draw(st.sampled_from(["replace", "replace", "remove", "add"])):
            case "replace":
                parent[last] = draw(odd)
            case "remove":
                del parent[last]
            case _ if isinstance(parent, dict):
                parent[draw(st.text(max_size=8))] = draw(odd)
            case _:
                parent.append(copy.deepcopy(parent[last]))
    return value


@st.composite
def mangled(draw: st.DrawFn, good: bytes) -> bytes:
    """`good` with bytes flipped, cut off, inserted or repeated."""
    raw = bytearray(good)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(raw)))
        match draw(st.sampled_from(["flip", "flip", "cut", "insert", "repeat"])):
            case "flip" if at < len(raw):
                raw[at] ^= draw(st.integers(1, 255))
            case "cut":
                del raw[at : at + draw(st.integers(1, 1 + len(raw)))]
            case "insert":
                raw[at:at] = draw(st.binary(max_size=16))
            case _:
                raw[at:at] = raw[:at][-draw(st.integers(1, 64)) :]
    return bytes(raw)


def json_bytes(value: Any) -> bytes:
    """JSON as Python's own reader takes it: NaN, and integers of any length."""
    return json.dumps(value).encode()


CONFIG: dict[str, Any] = yaml.safe_load("""
seed_everything: 0
model:
  backbone:
    {d_model: 32, n_layer: 1, n_head: 2, vocab_size: 48, name: fuzz, d_head: 16, d_ff: 8,
     qk_norm: false, post_norm: true, n_expert: 6, n_expert_active: 2, n_expert_shared: 1,
     d_expert: 21, rope_theta: 1.0e+4,
     norm_eps: 1.0e-5, init_std: 0.02, init_residual_scaling: true,
     router: {renormalize: true, balance: loss, balance_coef: 0.01, bias_rate: 1.0e-3, z_coef: 0.0}}
  scale: hg+dp+or
  scale_options:
    {placement_at: {lm_head: dp}, role_at: {v_proj.scale_out: input}, share_scale_out: false}
  optim:
    {name: muon, lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1.0e-8, weight_decay: 0.1,
     ns_dtype: float32}
  schedule: {name: wsd, warmup_ratio: 0.01, final_ratio: 0.0, stable_ratio: 0.8}
  tokens_per_param: 100.0
  mask_documents: false
  compile: none
  seed: 1
data:
  corpus: {dir: nowhere, source: stdlib, tokenizer: "bpe:300", val_fraction: 0.1, chunk_bytes: 64MB}
  seq_len: 32
  global_batch: 4
  micro_batch: 2
  num_workers: 0
  validations: 2
  val_sequences: 16
  seed: 0
trainer: {accelerator: cpu, max_steps: 12}
""")
#: as ODD; a count of a million blocks is no crash, only long
VALUES = ODD.filter(lambda value: not isinstance(value, int) or value < 100 or value >= 1 << 31)


@few_and(2000)
def test_strategy_hostile_is_read_or_refused(tally: Tally, n: int) -> None:
    known = [*PRESETS, *chain.from_iterable(AXES.values())]
    token = st.one_of(
        st.sampled_from(known),
        st.text(max_size=8),
        st.sampled_from(["", ":", "a:", ":b", "os:system", "..:x"]),
    )
    texts = st.one_of(st.lists(token, max_size=6).map("+".join), st.text(max_size=30), ODD)
    fuzz(tally, "hostile strategy", n, "hg+dnp+or", texts, ScaleStrategy.parse)


@pytest.mark.filterwarnings("ignore")
@few_and(500)
def test_fit_hostile_config_is_read_or_refused(tally: Tally, tmp_path: Path, n: int) -> None:
    path = tmp_path / "config.yaml"
    good = yaml.safe_dump(CONFIG).encode()
    texts = st.one_of(
        edited(CONFIG, VALUES).map(lambda value: yaml.safe_dump(value).encode()), mangled(good)
    )

    def read(raw: bytes) -> None:
        path.write_bytes(raw)
        parse_run(["--config", str(path)], check_corpus=False)

    fuzz(tally, "hostile config", n, good, texts, read)


@pytest.mark.filterwarnings("ignore")
@few_and(500)
def test_fit_hostile_override_is_read_or_refused(tally: Tally, tmp_path: Path, n: int) -> None:
    path = tmp_path / "good.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    keys = [
        ".".join(path) for path in leaves(CONFIG) if path[0] in ("model", "data") and len(path) > 1
    ]
    words = st.one_of(
        VALUES.map(str),
        st.text(max_size=12),
        st.sampled_from(
            ["null", "[]", "{}", ".inf", ".nan", "1e999", "!!python/name:os.system", "${model}"]
        ),
    )
    overrides = st.tuples(st.sampled_from(keys), words).map("--{0[0]}={0[1]}".format)
    lists = st.lists(overrides, min_size=1, max_size=2)

    def read(words: list[str]) -> None:
        try:
            parse_run(["--config", str(path), *words], check_corpus=False)
        except ConfigError as error:
            names = [word.partition("=")[0].rpartition(".")[2] for word in words]
            names += ["strategy"] * ("scale" in names)  # the message names its words instead
            names += ["int too large"]  # jsonargparse names no key then
            names += ["File name too long"]  # the message has the name of the file instead
            assert any(name in str(error) for name in names), (words, error)
            raise

    fuzz(tally, "hostile override", n, [], lists, read)


@pytest.mark.filterwarnings("ignore")
@few_and(1600)
def test_load_backbone_hostile_checkpoint_is_read_or_refused(
    tally: Tally, tmp_path: Path, n: int
) -> None:
    path = tmp_path / "last.ckpt"
    config = BackboneConfig(
        d_model=16, n_layer=1, n_head=2, vocab_size=20, n_expert=4, n_expert_active=2
    )
    made = {
        "format": FORMAT,
        "backbone": asdict(config),
        "scale": "unified",
        "scale_options": asdict(ScaleOptions()),
    }
    weights = Backbone(config, "unified").state_dict()
    state = {f"backbone.{name}": value for name, value in weights.items()}
    torch.save({CHECKPOINT_KEY: made, "state_dict": state, "global_step": 3}, path)
    good = path.read_bytes()

    def read(raw: bytes) -> None:
        path.write_bytes(raw)
        load_backbone(str(path))

    fuzz(tally, "hostile checkpoint", n, good, mangled(good), read)


FILES = {
    "manifest": "manifest.json",
    "index": "train/index.json",
    "shard": "val/chunk-0-0.bin",
    "tokenizer": "tokenizer.json",
}
#: numbers of inputs under the mark `faults`
MANY = {"manifest": 2000, "index": 700, "shard": 700, "tokenizer": 300}
INPUTS = [
    *((kind, 20) for kind in FILES),
    *(pytest.param(*row, marks=pytest.mark.faults) for row in MANY.items()),
]


@pytest.mark.parametrize(("kind", "n"), INPUTS)
def test_corpus_hostile_file_is_read_or_refused(
    corpus: Path, tmp_path: Path, tally: Tally, kind: str, n: int
) -> None:
    root = shutil.copytree(corpus, tmp_path / "corpus")
    path = root / FILES[kind]
    good = path.read_bytes()
    hostile = mangled(good)
    if path.suffix == ".json":
        hostile = st.one_of(edited(json.loads(good)).map(json_bytes), hostile)

    def read(raw: bytes) -> None:
        """As training does: check the corpus, read a block of each split and the tokenizer."""
        path.write_bytes(raw)
        (root / STAMP).unlink(missing_ok=True)
        manifest = Manifest.load(root)
        check_corpus(manifest, root, vocab_size=1 << 16, seq_len=8)
        if kind in ("shard", "tokenizer"):
            assert raw == good  # every change of a byte is refused
        for split in ("train", "val"):
            assert open_split(root, split, seq_len=8)[0].max() < manifest.vocab_size
        Tokenizer.load(root).encode("word")

    fuzz(tally, f"hostile {kind}", n, good, hostile, read)


@few_and(500)
def test_tokenizer_of_a_run_hostile_is_read_or_refused(
    corpus: Path, tally: Tally, tmp_path: Path, n: int
) -> None:
    """Nobody checks the hash of this tokenizer.json."""
    good = json.loads((corpus / "tokenizer.json").read_text())

    def read(raw: bytes) -> None:
        (tmp_path / "tokenizer.json").write_bytes(raw)
        tokenizer = Tokenizer.load(tmp_path)
        tokenizer.decode(tokenizer.encode("def naïve(): return 1"))

    hostile = st.one_of(edited(good).map(json_bytes), mangled(json_bytes(good)))
    fuzz(tally, "hostile tokenizer of a run", n, json_bytes(good), hostile, read)


LINE = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=40).map(lambda text: json.dumps({"text": text}).encode()),
    st.sampled_from(
        [
            b"[" * 100_000,
            b'{"text":' * 5_000,
            b"1" * 5_000,
            b'{"text": "\\ud800"}',
            b"\xff\xfe",
            b"null",
            b"NaN",
        ]
    ),
    st.dictionaries(
        st.sampled_from(["text", "Text", "id"]),
        st.one_of(st.none(), st.integers(), st.text(max_size=9)),
    ).map(json_bytes),
)
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".txt", ".md", ".py")
ROWS = [json_bytes({"text": f"{i} {'word ' * 30}"}) for i in range(12)]


@st.composite
def hostile_texts(draw: st.DrawFn) -> tuple[str, bytes]:
    """A file's suffix and content, with readable rows or without."""
    suffix = draw(st.sampled_from(SUFFIXES))
    raw = b"\n".join([*draw(st.sampled_from([ROWS, []])), *draw(st.lists(LINE, max_size=6))])
    return suffix, draw(mangled(gzip.compress(raw, mtime=0))) if suffix.endswith(".gz") else raw


@few_and(1000)
def test_prepare_hostile_text_is_read_or_refused(tally: Tally, tmp_path: Path, n: int) -> None:
    def read(text: tuple[str, bytes]) -> None:
        suffix, raw = text
        path = tmp_path / f"text{suffix}"
        path.write_bytes(raw)
        shutil.rmtree(tmp_path / "corpus", ignore_errors=True)
        config = CorpusConfig(
            dir=f"{tmp_path}/corpus", source=f"files:{path}", tokenizer="bpe:257", val_fraction=0.3
        )
        prepare(config, progress=False)

    fuzz(tally, "hostile text", n, (".jsonl", b"\n".join(ROWS)), hostile_texts(), read)
