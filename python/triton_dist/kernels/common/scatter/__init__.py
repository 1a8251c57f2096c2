"""GEMMs whose tiles are sent to the ranks that add them."""
