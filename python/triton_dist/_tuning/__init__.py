"""The tuner. Its public modules are :mod:`triton_dist.tune` and :mod:`triton_dist.autotuner`."""
