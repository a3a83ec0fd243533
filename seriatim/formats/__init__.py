"""Message formats that come with Seriatim, each a decoder behind engine/decoding.py.

JSON is built into the engine. Next: debezium.py; avro.py, protobuf.py and json_schema.py, whose
messages name their schema in a registry (registry.py).
"""
