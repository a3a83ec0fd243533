"""The ledger: what was committed, as entries on the records table; the only truth about what was
done.
"""
