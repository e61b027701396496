"""Train a transformers Llama with its Trainer: with decay by role, then with a strategy.

    python examples/hf_trainer.py --out plain-llama

Both start from the same weights and read the same batches, bytes of Python's standard library. The
second is folded afterwards and loaded by plain transformers. Run `make install-hf` first; no
download, half a minute on a CPU. After so few steps, the lower loss depends on the batches: this
does not compare the two.
"""

import argparse
import sysconfig
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

from lightning_sv.interop import apply_strategy, decayed_names, fold_applied

SEQ_LEN = 64
BATCH = 16
N_VALIDATION = 128  # sequences


class IwdTrainer(Trainer):
    """Decay matrices and input-side scale vectors, but no output-side ones."""

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names; with FSDP pass roles of weight_decay_roles, called before sharding."""
        return decayed_names(model, "iwd")


def text() -> Tensor:
    """Return blocks of bytes, (n, SEQ_LEN)."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    python_text = bytearray(b"".join(file.read_bytes() for file in files))
    ids = torch.frombuffer(python_text, dtype=torch.uint8).long()
    blocks = ids.unfold(0, SEQ_LEN, SEQ_LEN)
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0))
    return blocks[order]


def dataset(blocks: Tensor) -> list[dict[str, Tensor]]:
    """Return blocks as the Trainer reads them; the model shifts the labels."""
    return [{"input_ids": block, "labels": block} for block in blocks]


def small_llama() -> LlamaForCausalLM:
    """Return a Llama of 0.7 M parameters, always with the same weights."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=SEQ_LEN,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, blocks: Tensor, steps: int) -> float:
    """Return the validation loss in nats per byte after some steps of AdamW."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=64,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, steps // 10),
            weight_decay=0.1,
            adam_beta2=0.95,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=0,
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        trainer = IwdTrainer(
            model=model,
            args=arguments,
            train_dataset=dataset(blocks[N_VALIDATION : N_VALIDATION + steps * BATCH]),
            eval_dataset=dataset(blocks[:N_VALIDATION]),
        )
        trainer.train()
        return trainer.evaluate()["eval_loss"]


def main() -> None:
    """Train both models, fold the second, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=120, help="Number of steps of each run. (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, help="Output folder of the folded model. (default: a temporary folder)"
    )
    options = parser.parse_args()
    blocks = text()

    plain = train(small_llama(), blocks, options.steps)
    print(f"plain, iwd:             {plain:.3f} nats per byte after {options.steps} steps")

    model = small_llama()
    print(apply_strategy(model, "hg+dp+or+iwd"))
    print(f"hg+dp+or+iwd:           {train(model, blocks, options.steps):.3f}")

    model.eval()
    example = blocks[:4].to(model.device)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        out = options.out or Path(folder)
        before = model(example).logits
        fold_applied(model).save_pretrained(out)
        again = AutoModelForCausalLM.from_pretrained(out).to(model.device)
        difference = (again(example).logits - before).abs().max()
    print(f"folded, loaded as plain {type(again).__name__}: logits differ by {difference:.1e}")


if __name__ == "__main__":
    main()
