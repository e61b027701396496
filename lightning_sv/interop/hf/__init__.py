"""To and from the models of transformers: Llama, Mistral, Qwen 3, Gemma 3 and their mixtures of experts."""

from lightning_sv.interop.hf.families import hugging_face_config
from lightning_sv.interop.hf.folder import export
from lightning_sv.interop.hf.model import to_hugging_face
from lightning_sv.interop.hf.read import backbone_config, from_hugging_face

__all__ = ["backbone_config", "export", "from_hugging_face", "hugging_face_config", "to_hugging_face"]
