"""The command line, ``triton-dist`` and ``python -m triton_dist``: one module per subcommand."""
