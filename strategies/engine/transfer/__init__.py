"""Transfer: copies between the homes, the only streams and events, and the race detector."""
