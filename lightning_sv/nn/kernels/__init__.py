"""Optional Triton kernels; the reference implementation is in the parent package."""
