"""Exchanges: one launch that sends, waits and takes, and its memory."""
