"""Conversion to and from transformers: Llama, Mistral, Qwen 3, Gemma 3 and their mixtures of experts."""

from lightning_sv.interop.hf.convert import to_hugging_face
from lightning_sv.interop.hf.load import backbone_config, from_hugging_face
from lightning_sv.interop.hf.save import export

__all__ = ["backbone_config", "export", "from_hugging_face", "to_hugging_face"]
