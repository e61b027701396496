"""Tags of scalars that several packages read or write."""

#: mean over the steps since the last write, in nats per token
TRAIN_LOSS = "train/loss"
#: in nats per token
VAL_LOSS = "val/loss"
#: model FLOP/s over the peak of the GPUs
MFU = "throughput/mfu"
#: prefix of the tags of `callbacks.CopyingMonitor`
COPYING = "copying/"
