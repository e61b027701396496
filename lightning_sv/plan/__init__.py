"""Resources of a run before it starts: GPU memory, hours, checkpoint size, data.

allocated_bytes  bytes that operators allocate
step_memory      memory of an eager step on one device, simulated without data
compiled_memory  activations of a compiled step
parallel         distribution over GPUs, from the Trainer's settings
gpu_memory       memory of one of several GPUs, derived from that of one device
micro_batch      the largest micro-batch that fits
plan             all of it together, hours and data
parameters       number of parameters by role, next to the paper's
"""
