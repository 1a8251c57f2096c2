"""The only rooms that know hardware: devices, ranks and symmetric memory."""
