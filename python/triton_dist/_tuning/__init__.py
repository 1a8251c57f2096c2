"""The tuner. Its doors are :mod:`triton_dist.tune` and :mod:`triton_dist.autotuner`."""
