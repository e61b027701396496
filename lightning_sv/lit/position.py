"""Position of a fit in its corpus, and its epochs."""

from functools import partial
from typing import Any

import lightning as L
from torch.utils._pytree import tree_leaves

from lightning_sv.callbacks.run_state import settings_of
from lightning_sv.corpus import Epochs, TokenLoader


class CorpusPosition:
    """Position in the corpus that checkpoints have, and at which a resumed fit continues.

    It is the position of the loader that the Trainer reads. Before there is one, it is the position
    of the checkpoint. A user may make other loaders, e.g. to look at a batch; they do not count.
    """

    def __init__(self) -> None:
        self._loader: TokenLoader | None = None  # of the last fit; without a fit the last one made
        self._saved: dict[str, Any] | None = None  # position of the checkpoint

    def start(self, loader: TokenLoader, trainer: L.Trainer | None) -> TokenLoader:
        """Return a new loader; the first one of a resumed fit continues at its checkpoint."""
        self._loader = loader
        is_first_of_fit = trainer is not None and trainer.train_dataloader is None
        if is_first_of_fit and self._saved is not None:
            loader.load_state_dict(self._saved)
        return loader

    def keep(self, trainer: L.Trainer | None) -> None:
        """Keep the loader of a fit that has ended, because later checkpoints have its position."""
        self._loader = self._current_loader(trainer)

    def state(self, trainer: L.Trainer | None) -> dict[str, Any]:
        """Return the position as plain values; empty before there is one."""
        loader = self._current_loader(trainer)
        if loader is not None:
            return loader.state_dict()
        return self._saved or {}

    def restore(self, saved: dict[str, Any], trainer: L.Trainer | None) -> None:
        """Continue a fit from a saved position.

        Lightning restores it before it makes the loader, or after: then the loader takes it here.
        """
        is_fit = trainer is not None and trainer.state.fn == "fit"
        if not is_fit:
            return
        self._saved = saved
        loader = self._current_loader(trainer)
        if loader is not None:
            loader.load_state_dict(saved)

    def _current_loader(self, trainer: L.Trainer | None) -> TokenLoader | None:
        """Return the loader that the Trainer reads, which may be in a collection of loaders."""
        loaders = None if trainer is None else trainer.train_dataloader
        for loader in tree_leaves(loaders):
            if isinstance(loader, TokenLoader):
                return loader
        return self._loader


def epochs_of(trainer: L.Trainer) -> Epochs:
    """Return the epochs that a Trainer reads."""
    repeats = trainer.overfit_batches > 0  # type: ignore[attr-defined]
    first = 0 if repeats else trainer.current_epoch  # of reload_dataloaders_every_n_epochs
    return Epochs(
        first=first,
        repeat=repeats,
        limit=trainer.limit_train_batches,
        unfinished=partial(_unfinished_batches, trainer),
        repeats_begun_step=settings_of(trainer.lightning_module) is not None,  # by `ExactResume`
    )


def _unfinished_batches(trainer: L.Trainer) -> int:
    """Return the number of batches that were read but not trained."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return int(batches.ready - batches.processed)
