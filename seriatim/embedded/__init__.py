"""What Seriatim brings along: it finds and checks Java, fetches and verifies JARs, and runs a real
Kafka broker.

java.py finds Java; jars.py fetches JARs and keeps their cache; broker.py runs Kafka; doctor.py checks
everything, and refuses environments that are known to break.
"""
