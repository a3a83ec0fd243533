"""Proof of what is committed: verify (all of it, anew) and check (since the last verdict, with
suites).
"""
