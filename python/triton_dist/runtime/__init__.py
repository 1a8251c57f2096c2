"""Hardware access: devices, ranks and symmetric memory. No other package calls it directly."""
