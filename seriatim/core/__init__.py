"""The pure core: no I/O, no clock, no environment, no Spark, no Arrow. The linter says so.

Read in this order: errors, offsets, message, machine, table, integrity, fold, slice, ledger.
"""
