"""Tokenizers: exact round trips, canonical files, and errors in one sentence."""

from __future__ import annotations

import json
import random
import string
import unicodedata
from pathlib import Path

import huggingface_hub
import pytest
import tokenizers

from lightning_sv.corpus import CorpusConfig, Tokenizer, prepare
from lightning_sv.corpus.tokenizer import bpe_size, open_tokenizer
from lightning_sv.errors import ConfigError
from tests.corpus.conftest import write_rows

SPACES = "".join(c for c in map(chr, range(0x3001)) if c.isspace())
LETTERS = "".join(
    c for c in map(chr, range(0x11000)) if unicodedata.category(c) not in ("Cn", "Co", "Cs")
)
ALPHABETS = (
    string.printable,
    SPACES,
    LETTERS,
    string.ascii_lowercase + " ",
    "'sdmtlrveSDMT ",
    string.digits + "²½٠〇 ",
    "\u200b\u200d\ufeff\u00ad\u0300\u0301\x00\x1c\x1f\x7f\x85\u180e <|endoftext|>",
)


def random_text(draw: random.Random) -> str:
    """Return a text of one alphabet, of all, or of one repeated character."""
    kind = draw.randrange(len(ALPHABETS) + 2)
    if kind < len(ALPHABETS):
        return "".join(draw.choices(ALPHABETS[kind], k=draw.randint(1, 60)))
    if kind == len(ALPHABETS):
        return draw.choice(string.printable) * draw.randint(1, 300)
    mixed = draw.choices(ALPHABETS, k=draw.randint(1, 60))
    return "".join(map(draw.choice, mixed))


@pytest.mark.parametrize("number", [20_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_encode_batch_in_the_fast_library_gives_the_same_ids(number: int, corpus: Path) -> None:
    tokenizer = Tokenizer.load(corpus)
    assert tokenizer._fast is not None
    draw = random.Random(number)
    for _ in range(number // 2000):
        texts = [random_text(draw) for _ in range(2000)]
        fast = tokenizer.encode_batch(texts)
        slow = tokenizer._encode(texts)
        for text, ids, expected in zip(texts, fast, slow, strict=True):
            assert ids.tolist() == expected.tolist()
            assert tokenizer.decode(ids.tolist()) == text


@pytest.mark.parametrize(
    ("key", "value", "is_fast"),
    [("dropout", 0.9, True), ("unk_token", "a", False), ("ignore_merges", True, False)],
)
def test_tokenizer_unlike_gpt2_is_encoded_by_the_slow_library_without_dropout(
    key: str, value: object, is_fast: bool, corpus: Path
) -> None:
    text = "def function(argument): return argument\n" * 9
    tokenizer = Tokenizer.load(corpus)
    content = json.loads(tokenizer.content)
    content["model"][key] = value
    unlike = Tokenizer(json.dumps(content).encode(), "tokenizer.json")
    assert (unlike._fast is not None) == is_fast
    assert unlike.encode_batch([text])[0].tolist() == tokenizer.encode(text)


def test_tokenizer_file_without_the_keys_of_later_versions_is_the_same(corpus: Path) -> None:
    """GPT-2's file on the hub has neither the type of its model nor `use_regex`."""
    tokenizer = Tokenizer.load(corpus)
    content = json.loads(tokenizer.content)
    del content["normalizer"], content["added_tokens"]
    del content["model"]["type"], content["pre_tokenizer"]["use_regex"]
    older = Tokenizer(json.dumps(content).encode(), "tokenizer.json")
    assert older._fast is not None
    text = "a<|endoftext|>b c"
    assert older.encode_batch([text])[0].tolist() == tokenizer.encode(text)


def test_text_with_a_byte_that_a_byte_level_tokenizer_lacks_is_refused(corpus: Path) -> None:
    content = json.loads(Tokenizer.load(corpus).content)
    content["model"]["vocab"]["an unused name"] = content["model"]["vocab"].pop("~")
    tokenizer = Tokenizer(json.dumps(content).encode(), "tokenizer.json")
    assert tokenizer.decode(tokenizer.encode_batch(["a b"])[0].tolist()) == "a b"
    with pytest.raises(ValueError, match="0x7e"):
        tokenizer.encode_batch(["a ~"])


def test_encode_spelled_special_token_is_text(corpus: Path) -> None:
    tokenizer = Tokenizer.load(corpus)
    ids = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.eot not in ids and len(ids) > 3
    assert tokenizer.decode(ids) == "a<|endoftext|>b"
    assert tokenizer.decode([tokenizer.eot]) == "<|endoftext|>"


def test_open_tokenizer_gpt2_is_the_hubs_file_or_an_error(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda repository, name: str(corpus / name)
    )
    assert open_tokenizer("gpt2").content == (corpus / "tokenizer.json").read_bytes()

    def offline(repository: str, name: str) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(ConfigError, match="^tokenizer=gpt2"):
        open_tokenizer("gpt2")


def test_open_tokenizer_absent_or_bad_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    for name in ("absent.json", "bad.json"):
        with pytest.raises(ConfigError, match=name):
            open_tokenizer(str(tmp_path / name))


def test_bpe_is_trained_on_long_words_in_pieces() -> None:
    """The time of the training grows with the square of the longest word, e.g. of DNA: here it
    would take half an hour."""
    draw = random.Random(0)
    text = "a word " * 99 + "".join(draw.choices("acgt", k=500_000))
    tokenizer = Tokenizer.train([text], 300)
    assert tokenizer.decode(tokenizer.encode("a word")) == "a word"


def test_bpe_size_invalid_number_is_refused(texts: list[str]) -> None:
    assert bpe_size("bpe:50304") == 50304 and bpe_size("gpt2") is None
    for spec in ("bpe:", "bpe:x", "bpe:256", "bpe:-5"):
        with pytest.raises(ConfigError, match="^tokenizer is"):
            bpe_size(spec)
    with pytest.raises(ConfigError, match="bpe:90000") as more_than_the_text_supports:
        Tokenizer.train(texts, 90000)
    assert "--data.corpus.tokenizer bpe:" in str(more_than_the_text_supports.value)


def _published(folder: Path, *, vocabulary: list[str], **files: object) -> str:
    """A tokenizer.json of whole words, with files of transformers next to it."""
    folder.mkdir(exist_ok=True)
    words = {word: number for number, word in enumerate(vocabulary)}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    library.normalizer = tokenizers.normalizers.Lowercase()  # type: ignore[assignment]
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # type: ignore[assignment]
    library.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder / "tokenizer.json")


END = "<EOS_TOKEN>"
OTHER = "<|eos|>"
#: as DeepSeek publishes it
FULLWIDTH = "<\uff5cend\u2581of\u2581sentence\uff5c>"


@pytest.mark.parametrize(
    ("files", "eot", "expected"),
    [
        ({"tokenizer_config": {"eos_token": END}}, None, END),
        ({"tokenizer_config": {"eos_token": {"content": OTHER, "lstrip": False}}}, None, OTHER),
        ({"tokenizer_config": {"eos_token": None}}, None, FULLWIDTH),
        ({"tokenizer_config": {"eos_token": END}}, OTHER, OTHER),
        ({}, None, FULLWIDTH),
        ({}, "</s>", "</s>"),
    ],
)
def test_open_tokenizer_end_token_is_that_of_setting_or_files(
    files: dict[str, object], eot: str | None, expected: str, tmp_path: Path
) -> None:
    spec = _published(tmp_path / "model", vocabulary=["?", "</s>", END, OTHER, FULLWIDTH], **files)
    tokenizer = open_tokenizer(spec, eot)
    assert tokenizer.eot_token == expected
    tokenizer.save(tmp_path)  # as in a corpus or a run
    again = Tokenizer.load(tmp_path)
    assert (again.eot, again.sha256) == (tokenizer.eot, tokenizer.sha256)


def test_open_tokenizer_absent_end_token_is_refused(tmp_path: Path) -> None:
    spec = _published(
        tmp_path, vocabulary=["?", "a", "b", END, OTHER], tokenizer_config={"eos_token": "<none>"}
    )
    with pytest.raises(ConfigError, match="<none>"):
        open_tokenizer(spec)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        open_tokenizer(spec)


def test_prepare_again_with_another_tokenizer_or_end_token_is_refused(tmp_path: Path) -> None:
    words = [f"word{number}" for number in range(40)]

    def publish(end: str, *more: str) -> str:
        vocabulary = ["?", END, *words, *more]
        return _published(tmp_path, vocabulary=vocabulary, tokenizer_config={"eos_token": end})

    spec = publish(END)
    write_rows(tmp_path / "rows.jsonl", [" ".join(words[i:]) for i in range(40)])
    source = f"files:{tmp_path / 'rows.jsonl'}"
    config = CorpusConfig(str(tmp_path / "corpus"), source, spec, val_fraction=0.3)
    prepare(config, progress=False)
    for changed in [(END, "more"), ("word0",)]:
        publish(*changed)
        with pytest.raises(ConfigError, match=r"tokenizer\.json"):
            prepare(config, progress=False)


def test_prepare_end_token_of_a_bpe_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word\n" * 100)
    config = CorpusConfig(
        dir=str(tmp_path / "c"), source=f"files:{tmp_path}/a.txt", tokenizer="bpe:257", eot=END
    )
    with pytest.raises(ConfigError, match=f"eot is '{END}'"):
        prepare(config, progress=False)


def test_prepare_text_with_the_end_token_is_refused(tmp_path: Path) -> None:
    spec = _published(tmp_path / "model", vocabulary=["?", "a", "b", "end"])
    write_rows(tmp_path / "rows.jsonl", [f"a b {i}" for i in range(30)])
    source = f"files:{tmp_path / 'rows.jsonl'}"
    config = CorpusConfig(str(tmp_path / "out"), source, spec, eot="b", val_fraction=0.2)
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line \d+"):
        prepare(config, progress=False)
