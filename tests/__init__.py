"""The tests are a package so that spawned ranks can import functions from them by name."""
