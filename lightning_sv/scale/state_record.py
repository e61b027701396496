"""Check of state dicts by a property that their keys do not show."""

from typing import Any, ClassVar, NamedTuple

from torch import nn

from lightning_sv.errors import expect


class Recorded(NamedTuple):
    """An attribute that state dicts record: its name in the class and in errors, and a hint."""

    attribute: str
    name: str
    hint: str


class RecordedModule(nn.Module):
    """Module whose state dicts record an attribute; it rejects a state with a different value.

    Older files, safetensors, torch.distributed.checkpoint and plain dicts lack the record, and are
    accepted.
    """

    recorded: ClassVar[Recorded]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        attribute = self.recorded.attribute
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]][attribute] = getattr(self, attribute)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        attribute, name, hint = self.recorded
        own = getattr(self, attribute)
        saved = local_metadata.get(attribute, own)
        expect(saved == own, f"{name} of {prefix[:-1]}", saved, f"{own}, as in the model. {hint}")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
