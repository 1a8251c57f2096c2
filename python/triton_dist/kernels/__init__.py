"""Kernels, by vendor of the GPUs they are written for; all of them also run interpreted on CPU
ranks."""
