"""The operations of kernels/ops.py in Triton, for GPUs; `operations` lists them all."""
