"""Parts of model scripts: a model of blocks to be shared out, a key-value cache, seeds."""
