"""LightningModule, LightningDataModule, checkpoints and the command line of `fit`."""
