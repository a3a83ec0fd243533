"""The engine: one partition's messages, proved, decoded and folded in order. Pure: no I/O, no
clock, no Spark, no Arrow.
"""
