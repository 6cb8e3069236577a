"""Around the runtime, for those who look at it and operate it; nothing of the runtime imports it."""
