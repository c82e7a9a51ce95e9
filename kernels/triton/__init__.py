"""The operations of kernels/reference.py in Triton, for GPUs; `operations` has them all."""
