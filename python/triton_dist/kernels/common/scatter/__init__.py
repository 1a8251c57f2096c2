"""GEMMs whose tiles travel to the ranks that add them."""
