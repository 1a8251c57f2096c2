"""Building blocks of mixture-of-experts layers: device-side routing and grouped GEMMs."""
