"""Proof of what is committed: verify looks at all of it anew, check judges by suites what is new."""
