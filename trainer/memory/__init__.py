"""Every weight trains in memory close to its stored bytes: update rules, layer-major schedule, tiers, rounding, journal."""
