"""Kafka: discovery, readers, raw record batches, client settings, snapshot requests."""
