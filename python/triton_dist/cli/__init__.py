"""The command line, ``python -m triton_dist``: one module a verb."""
