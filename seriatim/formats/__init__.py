"""Message formats that come with Seriatim, each a decoder behind engine/decoding.py.

JSON is built into the engine. Next: debezium.py.
"""
