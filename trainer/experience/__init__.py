"""The experience pool: the durable store that joins samplers and learner."""
