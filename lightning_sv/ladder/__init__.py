"""Many small models on one GPU: whole steps as CUDA graphs on several streams, beside `fit` and equal to it."""
