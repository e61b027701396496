"""Corpora in an object store, here moto's S3 server on the loopback address."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
from moto.server import ThreadedMotoServer

from lightning_sv.__main__ import main
from lightning_sv.corpus import Manifest, Tokenizer, open_split
from lightning_sv.corpus import remote as remote_module
from lightning_sv.errors import ConfigError
from lightning_sv.runs.directory import read_config

BUCKET = "texts"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def s3(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of the empty store; the cache of corpora is empty too."""
    variables = {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "LIGHTNING_SV_CACHE": str(tmp_path / "cache"),
        "NO_PROXY": "127.0.0.1",
    }
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    remote_module._download.cache_clear()
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    for item in client.list_objects_v2(Bucket=BUCKET).get("Contents", []):
        client.delete_object(Bucket=BUCKET, Key=item["Key"])
    return client


@pytest.fixture
def url(s3: Any, corpus: Path) -> str:
    for path in filter(Path.is_file, corpus.rglob("*")):
        s3.upload_file(str(path), BUCKET, f"mine/corpus/{path.relative_to(corpus)}")
    return f"s3://{BUCKET}/mine/corpus"


def test_open_split_of_an_address_reads_the_sequences_of_the_folder(url: str, corpus: Path) -> None:
    ours = open_split(url, "train", seq_len=8)
    expected = open_split(corpus, "train", seq_len=8)
    assert ours.corpus_hash == expected.corpus_hash
    assert len(ours) == len(expected)
    for number in (0, len(ours) // 2, len(ours) - 1):
        assert torch.equal(ours[number], expected[number])


def test_local_folder_has_the_end_token_of_the_manifest(url: str, s3: Any, corpus: Path) -> None:
    manifest = replace(Manifest.load(corpus), eot=5)  # the id of an unusual token
    s3.put_object(
        Bucket=BUCKET, Key="mine/corpus/manifest.json", Body=json.dumps(manifest.to_dict())
    )
    assert Tokenizer.load(remote_module.local_folder(url)).eot == 5


def test_local_folder_of_a_second_process_downloads_no_shard(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = remote_module.local_folder(url)
    remote_module._download.cache_clear()
    monkeypatch.setattr(remote_module, "_fetch_all", None)
    assert remote_module.local_folder(url + "/") == folder
    assert sorted(path.suffix for path in folder.rglob("*.lock")) == []


def test_fit_with_an_address_keeps_it_in_the_config_of_the_run(url: str, tmp_path: Path) -> None:
    words = f"--config tiny-llama --trainer.max_steps 1 --data.corpus.dir {url} --data.seq_len 16"
    words += f" --data.corpus.tokenizer bpe:300 --data.val_sequences 2 --run_dir {tmp_path}/run"
    assert main(["fit", *words.split()]) == 0  # which reads the copy
    assert read_config(tmp_path / "run")["data"]["corpus"]["dir"] == url


def test_local_folder_of_a_changed_shard_is_refused(url: str, s3: Any, corpus: Path) -> None:
    shard = next(path for path in (corpus / "train").iterdir() if path.suffix != ".json")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    s3.put_object(Bucket=BUCKET, Key=f"mine/corpus/train/{shard.name}", Body=bytes(content))
    for _ in range(2):  # earlier downloads are kept, except the changed shard
        with pytest.raises(ConfigError, match=f"train/{shard.name} does not match its sha256"):
            remote_module.local_folder(url)


def test_local_folder_of_an_interrupted_download_fetches_only_the_rest(
    url: str, s3: Any, corpus: Path
) -> None:
    """Each shard is checked on its own, and a complete one is not downloaded again."""
    shards = Manifest.load(corpus).shards
    assert len(shards) > 3
    last = shards[-1].file
    key = f"mine/corpus/{last}"
    s3.delete_object(Bucket=BUCKET, Key=key)
    with pytest.raises(ConfigError, match=last):
        remote_module.local_folder(url)

    s3.upload_file(str(corpus / last), BUCKET, key)
    cache = Path(os.environ["LIGHTNING_SV_CACHE"])
    kept = {path: path.stat().st_ino for path in cache.rglob("*.bin")}
    folder = remote_module.local_folder(url)
    assert kept
    assert all(path.stat().st_ino == inode for path, inode in kept.items())
    assert all(
        (folder / shard.file).read_bytes() == (corpus / shard.file).read_bytes() for shard in shards
    )


@pytest.mark.parametrize(
    "address", [f"s3://{BUCKET}/none", "s3://no-such-bucket/corpus", "ftp://host/corpus"]
)
def test_local_folder_without_a_corpus_is_refused(s3: Any, address: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.corpus\.dir"):
        remote_module.local_folder(address)
