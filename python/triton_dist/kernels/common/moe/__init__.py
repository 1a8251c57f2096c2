"""Kit of mixture-of-experts layers: routing on the device, and products by expert."""
