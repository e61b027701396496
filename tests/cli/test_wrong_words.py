"""Wrong words of every command: one error that names them, before anything is written."""

import re
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger

from tests.conftest import CONFIG, ROOT, Refused, argv, thinned


class AbsentLogger(CSVLogger):
    """Needs a package that is not installed."""

    def __init__(self, n: int = 1) -> None:
        raise ModuleNotFoundError("No module named 'absent'")


ABSENT = f"{__name__}.AbsentLogger"
FSDP = "lightning_sv.lit.fsdp.FullyShardedStrategy"
SCALER = "lightning.pytorch.plugins.MixedPrecision"
#: configs whose corpus is not prepared, one with a folder that no error may name; that of RUN is
CONFIGS = {"COMPLETE": CONFIG, "NO_CORPUS": [*CONFIG, "--data.corpus.dir", "no_corpus"]}

#: wrong words, and a pattern of the error
WRONG = [
    # keys of a run
    ("fit COMPLETE --model.lr 0.1", "model.optim.lr"),
    ("fit COMPLETE --lr 0.1", "model.optim.lr"),
    ("fit COMPLETE --seed 1", "seed_everything"),
    ("fit COMPLETE --dry_run --trainer.max_step 3", "trainer.max_steps"),  # no abbreviation
    ("fit COMPLETE --dry_run --trainer.max_steps '${data.seq_len}' --trainer.max_step 3", "'trainer.max_steps'"),
    ("fit COMPLETE --dry_run --data.seq_len", "argument --data.seq_len"),
    ("fit COMPLETE --dry_run --model.optim '{weight_deacy: 1}'", "model.optim.weight_decay"),
    ("fit --modle tiny", "mean 'model'"),
    ("fit COMPLETE --model.optim ''", "--model.optim"),
    ("fit COMPLETE --trainer '{max_steps: 1, max_steps: 2}'", "--trainer"),
    ("fit COMPLETE --trainer null", "trainer"),
    ("plan --gpus 1 COMPLETE --optimizer=AdamW", "--optimizer"),
    # values of a run
    ("fit COMPLETE --model.optim.lr nan", "model.optim.lr"),
    ("fit COMPLETE --dry_run --data.seq_len x", "data.seq_len is 'x'"),
    ("fit COMPLETE --model.optim.name math:pi --model.optim.lr 1", "model.optim.name"),
    ("fit COMPLETE --dry_run --model.compile all", "model.compile is all"),
    ("fit COMPLETE --dry_run --model.scale unifed", "unifed"),
    ("fit COMPLETE --seed_everything -3", "seed_everything"),
    ("fit COMPLETE --seed_everything true", "seed_everything is True"),  # Lightning's 0 for every run
    ("fit COMPLETE --seed_everything x", "seed_everything is x;"),
    ("plan --gpus 1 COMPLETE --model.seed=1" + "0" * 20, "model.seed"),
    ("fit NO_CORPUS --model.backbone.n_expert 4", "model.backbone.n_expert is 4"),
    ("fit RUN --model.backbone.name mine", "model.optim.lr is not set"),
    ("fit RUN --model.backbone.vocab_size 200", "vocab_size is 200"),
    ("fit RUN --data.corpus.tokenizer gpt2", "bpe:300"),
    ("fit RUN --data.corpus.dir nowhere", "nowhere/manifest.json does not exist"),
    ("fit RUN --data.seq_len 1000000", "seq_len is 1000000"),
    ("fit RUN --data.val_sequences -3", "data.val_sequences is -3"),
    ("fit RUN --samples.tokens -1", "tokens of TextSamples is -1"),
    ("fit RUN --samples.tokens 5 --samples.top_k 0", "top_k is 0"),
    # arguments of the Trainer
    ("fit COMPLETE --trainer.accelerator gpu", "trainer: "),
    ("fit COMPLETE --dry_run --trainer.gradient_clip_val x", "trainer.gradient_clip_val is 'x'"),
    ("fit COMPLETE --trainer.gradient_clip_val=.inf", "trainer.gradient_clip_val"),
    ("fit COMPLETE --trainer.gradient_clip_val=-1e-9", "trainer.gradient_clip_val"),
    ("fit COMPLETE --trainer.max_steps=0", "trainer.max_steps"),
    ("fit COMPLETE --dry_run --trainer.val_check_interval 5", "trainer.val_check_interval is 5"),
    ("fit RUN --trainer.max_epochs 0", "trainer.max_epochs is 0"),
    ("fit RUN --trainer.devices -1", "error: trainer: "),
    ("fit RUN --trainer.devices 0.5", "error: trainer: "),
    ("fit RUN --trainer.devices true", "error: trainer: "),
    ("fit RUN --trainer.overfit_batches 1", "Prepare a corpus of the text to repeat"),
    ("fit RUN --trainer.precision 16-true", "trainer.precision is 16-true"),
    ("fit RUN --trainer.precision 16", "trainer.precision is 16"),
    ("fit RUN --trainer.limit_train_batches 3 --data.micro_batch 2", "limit_train_batches is 3"),
    ("fit RUN --trainer.devices=2 --trainer.strategy=ddp_spawn", "trainer.strategy is ddp_spawn"),
    ("plan --gpus 1 COMPLETE --trainer.strategy.init_args.timeout 1", "expected trainer.strategy.class_path."),
    ("plan --gpus 2 RUN --trainer.strategy fsdp", "trainer.strategy"),
    (f"plan --gpus 2 RUN --model.compile model --trainer.strategy {FSDP}", "model.compile"),
    ("plan --gpus 2 RUN --trainer.precision 16-mixed", "trainer.precision"),
    ("fit COMPLETE --dry_run --trainer.precision transformer-engine-float16", "trainer.precision"),
    ("plan --gpus 2 RUN --trainer.max_epochs 2", "trainer.max_epochs"),
    # callbacks, loggers and plugins
    ("fit COMPLETE --trainer.callbacks no_module.C", "No module named 'no_module'.\n"),
    ("fit COMPLETE --trainer.callbacks a..B", "trainer.callbacks is a..B;"),
    ("plan --gpus 1 COMPLETE --trainer.callbacks '[{class_path: json.Absent}]'", "trainer.callbacks is json.Absent;"),
    ("fit RUN --trainer.callbacks+=ModelCheckpoint --trainer.callbacks.save_last=true", "save_last of ModelCheckpoint is True"),
    ("fit RUN --trainer.logger false", "trainer.logger is False"),
    (f"fit COMPLETE --trainer.logger {ABSENT}", "absent"),
    (f"fit COMPLETE --trainer.logger {ABSENT} --trainer.logger.n x", "trainer.logger"),
    (
        f"fit COMPLETE --trainer.plugins {SCALER} --trainer.plugins.precision bf16-mixed --trainer.plugins.device cpu",
        "trainer.plugins is MixedPrecision",
    ),
    # configs, checkpoints and names
    ("fit", "--model NAME"),
    ("fit --trainer cpu", "--model NAME"),
    ("params", "--model NAME"),
    ("plan --gpus 1", "--model NAME"),
    ("compare --baseline llama --arms nop", "--model NAME"),
    ("fit --config llama-1", "llama-1b"),
    ("compare --baseline nop --arms hg --model tiny --data x.yaml", "--data is x.yaml"),
    ("fit --config runs/no_such_run/config.yaml", "no_such_run"),
    ("fit RUN --ckpt_path last.ckpt", "checkpoint is last.ckpt"),
    ("fit RUN --ckpt_path .", "which is not a file"),
    ("fit --model tinny", "tinny.*tiny"),
    ("fit --data leters", "leters.*letters"),
    ("fit --data stdlib/", "stdlib/"),
    ("fit --data stdlib.txt", "stdlib.txt"),
    ("fit --data pictures", "files:pictures"),
    ("fit --model tiny --model mini", "--model.*tiny.*mini"),
    ("fit --model tiny --scale hg --model.scale=llama", "--scale"),
    ("fit --model tiny --probes", "--probes"),
    ("fit --model tiny --config extra.yaml --trainer cpu", "--trainer cpu follows a file"),
    # before a corpus is prepared
    ("fit --model tiny --data 'my notes' --model.scale hgg", "hgg"),
    ("fit --model tiny --data 'my notes' --trainer.precision 8", "trainer.precision"),
    ("fit --model tiny --data 'my notes' --data.corpus.dir mine", "data.corpus.dir is mine"),
    ("compare --baseline nop --arms hg --model tiny --data 'my notes' --trainer.max_time 1:0", "max_time"),
    ("compare --baseline nop --arms hg --model tiny --dry_run", "compare: --dry_run is"),
    ("compare --baseline nop --arms hg --model tiny --b_args '--model.optim.learning_rate 1'", "learning_rate"),
    ("sweep --scale hg --lr 0.1 --model tiny --dry_run", "sweep: --dry_run is"),
    ("sweep --scale hg --lr 0.1 --model tiny --data.seq_len x", "data.seq_len is 'x'"),
    # before a corpus is read
    ("compare --baseline nop --arms hg NO_CORPUS --model.backbone.nope 3", "model.backbone.nope"),
    ("compare --baseline llama --arms typo NO_CORPUS", "typo"),
    ("sweep --scale typo --lr 1e-3 2e-3 3e-3 NO_CORPUS", "typo"),
    ("sweep --scale llama NO_CORPUS", "--lr"),
    ("sweep --scale llama --lr -1 2 3 NO_CORPUS", "lr"),
    # options of other commands
    ("plan RUN", "--gpus"),
    ("plan --gpus 0 RUN", "--gpus"),
    ("plan --gpus two RUN", "--gpus"),
    ("plan --gpus 64 RUN --data.global_batch 480", "data.global_batch"),
    ("plan --gpus 2 RUN --data.micro_batch 3", "data.micro_batch"),
    ("plan --gpus 2 RUN --mfu 40", "--mfu"),
    ("plan --gpus 2 RUN --gpu h1000", "h100"),
    ("plan --gpus 2 RUN --gpu_memory -1", "--gpu_memory"),
    ("plan --gpus 1 COMPLETE --gpu_memory=inf", "--gpu_memory"),
    ("compare --baseline nop --arms hg --jobs=1" + "0" * 5000, "--jobs"),
    ("compare --baseline nop --arms hg --jobs=1" + "0" * 400, "--jobs"),
    ("paper --data.seed 1 --seeds 3 --no_train", "paper: --seeds is"),
    ("sweep --scale hg --lr 0.1 --seeds=999999999", "--seeds"),
    ("generate r --temperature=nan", "--temperature"),
    ("generate r --seed=-1", "--seed"),
    ("generate README.md", "README.md"),
    ("train", "fit"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "named"), thinned(WRONG, WRONG[::2], several=True))
def test_wrong_words_are_named_before_anything_is_written(
    words: str,
    named: str,
    run_args: list[str],
    folder: Path,
    refused: Refused,
) -> None:
    for name in ("conf", "README.md"):  # of a repository without a corpus
        (folder / name).symlink_to(ROOT / name)
    before = sorted(folder.rglob("*"))
    given: list[str] = []
    for word in argv(words):
        given += (CONFIGS | {"RUN": run_args}).get(word, [word])
    said = refused(*given)
    assert re.search(named, said) and said.count("error: ") == 1 and "no_corpus" not in said
    assert sorted(folder.rglob("*")) == before
