"""The ledger: every commit of a stream, as entries on its records table. It is the only source of
truth about what was done.

Next: ledger/model.py has the values, ledger/entries.py what changes them, ledger/commit.py the
commit rule.
"""
