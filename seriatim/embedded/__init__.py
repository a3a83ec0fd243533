"""Parts that Seriatim brings along: Java found and checked, JARs fetched and proved, a real Kafka
broker.

Rooms: java.py finds Java; jars.py keeps the cache of JARs, ivy.py fills it; broker.py runs Kafka;
traps.py refuses environments that are known to break; alone.py lets one process in at a time.
"""
