"""Bridges to other code: folding scale vectors away, Hugging Face."""

from lightning_sv.interop.fold import fold
from lightning_sv.interop.hf import to_hugging_face

__all__ = ["fold", "to_hugging_face"]
