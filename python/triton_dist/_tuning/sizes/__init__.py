"""Tune functions at many sizes: predict good configs for a size from records of other sizes."""
