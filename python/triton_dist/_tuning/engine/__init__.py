"""The tuner itself. It knows devices, ranks, stores and searches as protocols only."""
