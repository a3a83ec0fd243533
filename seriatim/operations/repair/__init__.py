"""Repair: find damage, rewind to a good state, fold again, replace by one commit."""
