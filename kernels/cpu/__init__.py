"""The C++ kernels for processors."""
