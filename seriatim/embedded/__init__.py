"""What Seriatim brings along: it finds and checks Java, fetches and verifies JARs, and runs a real
Kafka broker.

java.py finds Java; jars.py fetches JARs and keeps their cache; broker.py runs Kafka with
the settings of properties.py; traps.py refuses environments that are known to break; doctor.py
checks everything; file_lock.py lets one process at a time do slow work.
"""
