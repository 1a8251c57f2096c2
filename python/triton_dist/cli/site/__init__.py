"""A folder for ``PYTHONPATH``, by which ``triton-dist dump`` sees what a program compiles."""
