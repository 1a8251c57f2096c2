"""Parts that several ops share: contexts, launches, and the kits that ops are made of."""
